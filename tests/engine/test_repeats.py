"""Runs with real engines are bit-identical after a kill and with other engines."""

from pathlib import Path

import pytest

from megatron_rl.run.checkpoints.state_file import read_state
from tests.support.comparable import assert_same_weights, metrics_of_any_engines
from tests.support.exactness import EXACT
from tests.support.jobs import kill, process_tree, start_job, wait_for_step

STEPS = 6

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.chaos,
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def test_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The resumed run selects the same prompts and samples the same tokens.

    It has one engine instead of two that share a tree.
    """
    settings = (
        "selection=belief",
        f"train.total_steps={STEPS}",
        "run.checkpoint_every=2",
        "run.save_weights=true",
        "eval.every=3",
    )
    reference_root = tmp_path / "uninterrupted"
    resumed_root = tmp_path / "resumed"
    job = start_job(reference_root, *settings, "engine.count=2", "sync.engines_per_tree=2")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output[-4000:]
    job = start_job(resumed_root, *settings, "engine.max_running_requests=5")
    wait_for_step(resumed_root / "job", 3, job)
    kill(job, process_tree(job))
    job = start_job(
        resumed_root,
        *settings,
        "engine.max_running_requests=5",
        "run.resume=auto",
        "logger.progress=true",
    )
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0 and "resuming after step" in output, output[-4000:]
    assert metrics_of_any_engines(resumed_root / "job") == metrics_of_any_engines(
        reference_root / "job"
    )
    assert_same_weights(resumed_root / "job", reference_root / "job", STEPS)
    checkpoint = f"job/checkpoints/iter_{STEPS:07d}"
    uninterrupted_state = read_state(reference_root / checkpoint)
    resumed_state = read_state(resumed_root / checkpoint)
    assert resumed_state.position == uninterrupted_state.position
    assert resumed_state.position.selection.beliefs is not None
