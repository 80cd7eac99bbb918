"""Samples of a training step on two ranks, in every kind of layout and in both precisions.

`test_worker.py` has some of these scenarios every day.
"""

import json
from pathlib import Path

import pytest

from tests.support.sample_checks import Scenario, check_samples
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("worker_steps.py")
GRIDS = ("", "pipeline_", "interleaved_", "tensor_", "context_")
NAMES = [f"{grid}samples_{dtype}" for grid in GRIDS for dtype in ("float32", "bfloat16")]

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenario]:
    directory = tmp_path_factory.mktemp("samples")
    output = torchrun(SCRIPT, str(directory), *NAMES, ranks=2)
    lines = [line.split(" ", 2) for line in output.splitlines() if line.startswith("RESULT ")]
    return {name: Scenario(directory / name, json.loads(text)) for _, name, text in lines}


@pytest.mark.parametrize("name", NAMES)
def test_samples_hold_what_the_ranks_computed(scenarios: dict[str, Scenario], name: str) -> None:
    check_samples(scenarios, name)


def test_precisions_differ(scenarios: dict[str, Scenario]) -> None:
    """Otherwise the bfloat16 scenarios would prove nothing."""
    float32 = scenarios["samples_float32"].samples
    bfloat16 = scenarios["samples_bfloat16"].samples
    assert any(
        (float32[name].tokens.logprobs != bfloat16[name].tokens.logprobs).any() for name in float32
    )
