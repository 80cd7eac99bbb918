"""Skips the tests of Megatron modules on machines with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        skip = pytest.mark.skip(reason="these tests pin down the CPU path")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)
