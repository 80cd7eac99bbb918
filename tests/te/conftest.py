"""Tests that need Transformer Engine and no GPU, in the environment of `make te-rehearsal`.

Elsewhere they are not collected. One process has one pretended GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("transformer_engine") else ["test_*.py"]


@pytest.fixture(scope="session")
def rehearsal() -> Iterator[Any]:
    """Import Transformer Engine with stand-ins, and create Megatron's groups for this process."""
    warnings.filterwarnings("ignore")
    from tests.lab.te_rehearsal.transformer_engine import start

    result = start()
    from megatron_rl.mcore import parallel
    from tests.lab.te_rehearsal.models import GRID

    with result.cuda.off():
        parallel.initialize(GRID, seed=1)
    yield result
    parallel.shutdown()


@pytest.fixture(scope="session")
def machine(rehearsal: Any) -> Any:
    """Builds models as a GPU with Transformer Engine does, or as a CPU does."""
    from tests.lab.te_rehearsal.models import Machine

    return Machine(rehearsal.cuda)
