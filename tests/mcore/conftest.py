"""Prepares Megatron for its tests, which are skipped on machines with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.mcore import compat

# As in a rank, before a test imports Megatron: without it torch's compiler is imported, too.
compat.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        skip = pytest.mark.skip(reason="these tests pin down the CPU path")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)
