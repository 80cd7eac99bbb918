"""Runs whose rollouts are sampled ahead repeat bit for bit, also after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.testbed.jobs import kill, process_tree, start_job, wait_for_step
from megatron_rl.run.checkpoints.state_file import read_state
from tests.support.comparable import assert_same_weights, metrics_of_any_engines
from tests.support.exactness import EXACT

STEPS = 6
SELECTIONS = {
    "uniform": ("selection=uniform",),
    "oversample": ("selection=oversample",),
    # Each prompt is sampled, and first with a probe
    "belief": (
        "selection=belief",
        "selection.expert.acceptance_target=1",
        "selection.expert.acceptance_exponent=0",
    ),
}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def run_whole(root: Path, *settings: str) -> Path:
    job = start_job(root, *settings)
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output[-4000:]
    return root / "job"


def run_killed(root: Path, step: int, *settings: str) -> Path:
    """Kill a run after a step, and resume it."""
    job = start_job(root, *settings)
    wait_for_step(root / "job", step, job)
    kill(job, process_tree(job))
    return run_whole(root, *settings, "run.resume=auto")


def read_records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def count_extensions(records: list[dict[str, Any]]) -> int:
    """Return the number of steps with extended probes."""
    return sum(record.get("select/probes_extended", 0.0) > 0 for record in records)


@pytest.mark.parametrize(
    ("dtype", "staleness", "selection", "kill_after"),
    [
        ("float32", 1, "belief", 3),
        ("bfloat16", 1, "uniform", 4),
        pytest.param("bfloat16", 2, "belief", 1, marks=pytest.mark.nightly),
        pytest.param("float32", 2, "oversample", 5, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_that_samples_ahead_resumes_bit_for_bit(
    tmp_path: Path, dtype: str, staleness: int, selection: str, kill_after: int
) -> None:
    settings = (
        f"model.dtype={dtype}",
        f"rollout.max_staleness={staleness}",
        *SELECTIONS[selection],
        f"train.total_steps={STEPS}",
        "run.checkpoint_every=2",
        "run.save_weights=true",
        "eval.every=3",
    )
    whole = run_whole(tmp_path / "whole", *settings, "engine.count=2")
    killed = run_killed(tmp_path / "killed", kill_after, *settings, "engine.max_running_requests=5")
    assert metrics_of_any_engines(killed) == metrics_of_any_engines(whole)
    assert_same_weights(killed, whole, STEPS)
    checkpoint = f"checkpoints/iter_{STEPS:07d}"
    assert read_state(killed / checkpoint).position == read_state(whole / checkpoint).position
    records = read_records(whole)
    assert count_extensions(records) == (STEPS if selection == "belief" else 0)
    assert [r["rollout/age/max"] for r in records[1:]] == [0.0] + [1.0] * (STEPS - 1)
    assert all(record["account/unaccounted"] == 0.0 for record in records)
    saved = read_state(whole / "checkpoints/iter_0000004")
    assert saved.position.steps_ahead == (5,)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_a_killed_run_with_budgets_resumes_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    """The killed run has one engine, so its responses end at other times."""
    settings = (
        f"model.dtype={dtype}",
        "rollout.max_staleness=2",
        "rollout.on_update=budget",
        "rollout.tokens_per_version=2",
        f"train.total_steps={STEPS}",
        "run.checkpoint_every=2",
        "run.save_weights=true",
    )
    whole = run_whole(tmp_path / "whole", *settings, "engine.count=2")
    killed = run_killed(tmp_path / "killed", 3, *settings, "engine.max_running_requests=5")
    assert_same_weights(killed, whole, STEPS)
    assert read_state(whole / "checkpoints/iter_0000004").position.steps_ahead == (5, 6)
    for run in (whole, killed):
        records = read_records(run)
        ages = [record.get("rollout/age/max", 0.0) for record in records]
        assert max(ages) == 2.0
        assert all(record["account/unaccounted"] == 0.0 for record in records)
