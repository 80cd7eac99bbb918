"""Runs with real engines that are killed, or whose engines work in another way, end with the same
bits.
"""

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.run.checkpoints.state_file import read_state
from tests.support.comparable import assert_same_weights, metrics_of
from tests.support.exactness import EXACT
from tests.support.jobs import family, kill, start_job, wait_for_step

STEPS = 6

pytestmark = [
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.chaos,
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def shared_metrics(run: Path) -> list[dict[str, Any]]:
    """All but the one that counts what each engine was asked for."""
    return [
        {k: v for k, v in record.items() if k != "sync/audit_compared"}
        for record in metrics_of(run)
    ]


def test_a_run_that_is_killed_goes_on_as_one_that_is_not(tmp_path: Path) -> None:
    """It chooses the same prompts by the same beliefs and draws the same tokens, with one engine
    for two.
    """
    settings = (
        "selection=belief",
        f"train.total_steps={STEPS}",
        "run.checkpoint_every=2",
        "run.save_weights=true",
        "eval.every=3",
    )
    never, killed = tmp_path / "never", tmp_path / "killed"
    job = start_job(never, *settings, "engine.count=2")
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output[-4000:]
    job = start_job(killed, *settings, "engine.max_running_requests=5")
    wait_for_step(killed / "job", 3, job)
    kill(job, family(job))
    job = start_job(
        killed,
        *settings,
        "engine.max_running_requests=5",
        "run.resume=auto",
        "logger.progress=true",
    )
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0 and "going on after step" in output, output[-4000:]
    assert shared_metrics(killed / "job") == shared_metrics(never / "job")
    assert_same_weights(killed / "job", never / "job", STEPS)
    never_killed, gone_on = (
        read_state(root / f"job/checkpoints/iter_{STEPS:07d}") for root in (never, killed)
    )
    assert (
        gone_on.position == never_killed.position and gone_on.position.selection.beliefs is not None
    )
