"""The order of requests changes no response: real engines, whole runs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.support.comparable import assert_same_weights, metrics_of_any_engines
from tests.support.exactness import EXACT
from tests.support.jobs import kill, process_tree, start_job, wait_for_step

STEPS = 4

pytestmark = [
    pytest.mark.engine,
    pytest.mark.distributed,
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


def settings_of(dtype: str, *, staleness: int = 0, on_update: str = "wait") -> tuple[str, ...]:
    """Return the settings of a run whose prompts have histories from the second step on."""
    return (
        f"model.dtype={dtype}",
        f"rollout.max_staleness={staleness}",
        f"rollout.on_update={on_update}",
        "rollout.max_new_tokens=24",
        "data.num_train=16",
        # Few requests at a time, so that their order matters
        "engine.max_running_requests=3",
        f"train.total_steps={STEPS}",
        "run.save_weights=true",
        "logger.save_rollouts_every=1",
    )


def digest(folder: Path, *, arrays_only: bool = False) -> str:
    """Return the SHA-256 of what a run has recorded, without times.

    It is of the arrays, because the header of a file has its keys in any order. arrays_only: leave
    out what describes the rollouts, such as the weight versions of their tokens.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".safetensors":
            for name, array in sorted(load_file(file).items()):
                digest.update(f"{name} {array.dtype} {array.shape}".encode())
                digest.update(array.tobytes())
        elif file.suffix == ".jsonl" and not arrays_only:
            for line in file.read_text().splitlines():
                digest.update(json.dumps(without_times(json.loads(line))).encode())
    return digest.hexdigest()


def without_times(group: dict[str, Any]) -> dict[str, Any]:
    for rollout in group["rollouts"]:
        rollout["verdict"]["seconds"] = 0.0
    return group | {"generated_at": 0.0, "scored_at": 0.0}


@pytest.mark.parametrize(
    ("dtype", "engines", "staleness"),
    [
        ("bfloat16", 2, 0),
        pytest.param("bfloat16", 1, 1, marks=pytest.mark.nightly),
        pytest.param("float32", 1, 0, marks=pytest.mark.nightly),
        pytest.param("float32", 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_run_records_and_trains_the_same_in_both_orders(
    tmp_path: Path, dtype: str, engines: int, staleness: int
) -> None:
    settings = settings_of(dtype, staleness=staleness)
    first_run = run_whole(tmp_path / "submission", *settings, "rollout.order=submission")
    other_run = run_whole(
        tmp_path / "longest", *settings, "rollout.order=longest", f"engine.count={engines}"
    )
    assert list((first_run / "rollouts").glob("step-*/*.safetensors"))
    assert digest(first_run / "rollouts") == digest(other_run / "rollouts")
    assert_same_weights(first_run, other_run, STEPS)
    assert metrics_of_any_engines(first_run) == metrics_of_any_engines(other_run)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("engines", [1, 2])
def test_a_recording_is_the_same_in_both_orders(tmp_path: Path, dtype: str, engines: int) -> None:
    settings = (
        *settings_of(dtype),
        "mode=rollout_only",
        "run.save_weights=false",
        "logger.save_rollouts_every=0",
        f"engine.count={engines}",
    )
    digests = {
        digest(run_whole(tmp_path / order, *settings, f"rollout.order={order}") / "recorded")
        for order in ("longest", "submission")
    }
    assert len(digests) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_interrupted_responses_are_the_same_in_both_orders(tmp_path: Path, dtype: str) -> None:
    """Compare runs whose weights never change: a clock decides where responses are interrupted."""
    settings = (
        *settings_of(dtype, staleness=2, on_update="resume"),
        "optimizer.lr=0",
        "rollout.max_new_tokens=64",
    )
    runs = [
        run_whole(tmp_path / order, *settings, f"rollout.order={order}", f"engine.count={count}")
        for order, count in (("longest", 2), ("submission", 1))
    ]
    assert len({digest(run / "rollouts", arrays_only=True) for run in runs}) == 1
    for run in runs:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert all(record["account/unaccounted"] == 0.0 for record in records[1:])
        assert max(record["rollout/age/max"] for record in records[1:]) >= 1.0


@pytest.mark.nightly
@pytest.mark.chaos
@pytest.mark.parametrize(("dtype", "staleness"), [("bfloat16", 1), ("float32", 0)])
def test_a_killed_run_resumes_bit_for_bit_in_the_other_order(
    tmp_path: Path, dtype: str, staleness: int
) -> None:
    settings = (*settings_of(dtype, staleness=staleness), "run.checkpoint_every=2")
    whole = run_whole(tmp_path / "whole", *settings, "rollout.order=submission")
    root = tmp_path / "killed"
    job = start_job(root, *settings, "rollout.order=longest")
    wait_for_step(root / "job", 3, job)
    kill(job, process_tree(job))
    killed_run = run_whole(root, *settings, "rollout.order=longest", "run.resume=auto")
    assert digest(whole / "rollouts") == digest(killed_run / "rollouts")
    assert_same_weights(whole, killed_run, STEPS)
