"""Runs whose rollouts are sampled ahead repeat bit for bit, also after a kill."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group
from megatron_rl.rollouts.recording.format import batch_directory
from megatron_rl.rollouts.recording.reader import read_groups
from megatron_rl.run.checkpoints.state_file import read_state
from tests.support.comparable import assert_same_weights, metrics_of_any_engines
from tests.support.exactness import EXACT
from tests.support.jobs import kill, process_tree, start_job, wait_for_step

STEPS = 6
SELECTIONS = {
    "uniform": ("selection=uniform",),
    "oversample": ("selection=oversample",),
    # Groups of four are rarely mixed, so that each prompt is sampled with a probe first
    "belief": (
        "selection=belief",
        "selection.skip=zero_variance",
        "selection.probe_samples=2",
        "rollout.samples_per_prompt=4",
    ),
}

pytestmark = [
    pytest.mark.nightly,
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
        ("bfloat16", 2, "belief", 1),
        ("float32", 2, "oversample", 5),
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
    killed_run = run_killed(
        tmp_path / "killed", kill_after, *settings, "engine.max_running_requests=5"
    )
    assert metrics_of_any_engines(killed_run) == metrics_of_any_engines(whole)
    assert_same_weights(killed_run, whole, STEPS)
    checkpoint = f"checkpoints/iter_{STEPS:07d}"
    assert read_state(killed_run / checkpoint).position == read_state(whole / checkpoint).position
    records = read_records(whole)
    assert count_extensions(records) == (STEPS if selection == "belief" else 0)
    assert [r["rollout/age/max"] for r in records[1:]] == [0.0] + [1.0] * (STEPS - 1)
    assert all(record["account/unaccounted"] == 0.0 for record in records)
    saved_state = read_state(whole / "checkpoints/iter_0000004")
    assert saved_state.position.steps_ahead == (5,)


def read_open_groups(run: Path, step: int) -> list[Group]:
    """Return what the checkpoint of a step has of the groups of open steps."""
    folder = run / f"checkpoints/iter_{step:07d}"
    position = read_state(folder).position
    directories = [batch_directory(folder / "rollouts", open_) for open_ in position.open_steps]
    return [group for directory in directories for group, _ in read_groups(directory)]


def assert_accounted(run: Path, max_age: float) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("rollout/age/max", 0.0) for record in records) == max_age
    assert all(record.get("rollout/rejected", 0.0) == 0.0 for record in records)
    # With open requests, the record of step 1 counts the tokens of the evaluation of step 0
    assert all(record["account/unaccounted"] == 0.0 for record in records[1:])
    assert all(record["time/engines_idle"] >= 0.0 for record in records[1:])
    for age in range(int(max_age) + 1):
        assert any(f"mismatch/age/{age}/k3_kl" in record for record in records)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_interrupts_responses_is_stopped_and_continues_them(
    tmp_path: Path, dtype: str
) -> None:
    settings = (
        f"model.dtype={dtype}",
        "rollout.max_staleness=2",
        "rollout.on_update=resume",
        "rollout.max_new_tokens=64",
        f"train.total_steps={STEPS}",
        "run.checkpoint_every=100",
    )
    job = start_job(tmp_path, *settings)
    run = tmp_path / "job"
    wait_for_step(run, 2, job)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == ExitCode.REQUEUE, output[-4000:]
    (checkpoint,) = (run / "checkpoints").glob("iter_*")
    step = read_state(checkpoint).step
    position = read_state(checkpoint).position
    assert position.open_steps == tuple(range(step + 1, min(step + 2, STEPS) + 1))
    saved_ids = {
        rollout.rollout_id: rollout.tokens_by_version
        for group in read_open_groups(run, step)
        for rollout in group.rollouts
    }
    assert saved_ids
    run_whole(tmp_path, *settings, "run.resume=auto", "logger.save_rollouts_every=1")
    assert_accounted(run, 2.0)
    assert_continued(run, position.open_steps, saved_ids)


def assert_continued(
    run: Path, steps: Sequence[int], versions: dict[str, tuple[tuple[int, int], ...]]
) -> None:
    """Check that no token was sampled again of what a checkpoint had of open steps.

    versions: by rollout, (weight version, tokens) in the checkpoint. Groups of equal rewards are
    not trained, so their rollouts are not recorded.
    """
    num_found = 0
    for step in steps:
        for group, _ in read_groups(batch_directory(run / "rollouts", step)):
            for rollout in group.rollouts:
                earlier = versions.get(rollout.rollout_id, ())
                if earlier:
                    assert_begins_with(rollout.tokens_by_version, earlier)
                    num_found += 1
    assert num_found


def assert_begins_with(
    versions: Sequence[tuple[int, int]], earlier: tuple[tuple[int, int], ...]
) -> None:
    """Check that a response goes on from what there was of it. More of its last version may follow.

    Both are (weight version, tokens).
    """
    *whole, (last_version, num_tokens) = earlier
    assert versions[: len(whole)] == tuple(whole)
    version, num_tokens_now = versions[len(whole)]
    assert version == last_version and num_tokens_now >= num_tokens
