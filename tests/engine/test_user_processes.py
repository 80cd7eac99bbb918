"""A run whose scorer and environment are in processes has the bits of one that has them inside."""

import json
from pathlib import Path

import pytest

from megatron_rl.records.effective_time import is_time
from tests.support.jobs import start_job

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]
# The same classes, built in and by their dotted names, which puts them in processes
BUILT_IN = ("reward.name=exact_match", "environment.name=single_turn")
BY_NAME = (
    "reward=custom",
    "reward.name=megatron_rl.rewards.exact_match:ExactMatch",
    "reward.options={answer: last_number}",
    "environment=custom",
    "environment.name=megatron_rl.environments.environment:SingleTurn",
)


def run_job(
    folder: Path, classes: tuple[str, ...], dtype: str
) -> tuple[list[dict[str, object]], bytes]:
    """Return the metrics that are no times, and the weights."""
    folder.mkdir()
    overrides = ("train.total_steps=2", "run.save_weights=true", f"model.dtype={dtype}")
    job = start_job(folder, *classes, *overrides)
    output, _ = job.communicate(timeout=280)
    assert job.returncode == 0, output[-4000:]
    lines = (folder / "job/metrics.jsonl").read_text().splitlines()
    records = [
        {name: value for name, value in json.loads(line).items() if not is_time(name)}
        for line in lines
    ]
    return records, (folder / "job/checkpoints/step-2/model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_classes_in_processes_give_the_metrics_and_weights_of_built_in_ones(
    tmp_path: Path, dtype: str
) -> None:
    records, weights = run_job(tmp_path / "built_in", BUILT_IN, dtype)
    other_records, other_weights = run_job(tmp_path / "by_name", BY_NAME, dtype)
    assert len(records) == 3 and records == other_records
    assert weights == other_weights
