"""A run with real engines rolls back, and its engines hold the weights of the checkpoint."""

from pathlib import Path

import pytest

from megatron_rl.records.past_run import Record, read_metrics
from tests.support.jobs import start_job

pytestmark = [
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

PLUGINS = Path(__file__).parents[1] / "distributed/plugins"
SPIKE = 10
STEPS = 11


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_go_on_with_the_weights_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS), prepend=":")
    records = train(tmp_path, dtype)
    assert list(records) == list(range(STEPS + 1))
    assert records[SPIKE]["guard/rolled_back_to"] == 8
    assert records[SPIKE]["account/rolled_back"] == trained_tokens(records[SPIKE - 1])
    assert [records[step]["sync/version"] for step in range(STEPS + 1)] == list(range(STEPS + 1))
    audits = [step for step in records if "sync/audit_compared" in records[step]]
    assert audits == [0, SPIKE] and records[SPIKE]["sync/audit_mismatches"] == 0
    losses = [records[step]["rollout/rejected"] for step in range(1, STEPS + 1)]
    assert losses == [0.0] * STEPS
    assert records[STEPS]["train/optimizer_steps"] == 1


def train(root: Path, dtype: str) -> dict[int, Record]:
    """Train with a spike in step 10, and return the records by step.

    The loss is called once for the warm-up and once in each step.
    """
    job = start_job(
        root,
        f"train.total_steps={STEPS}",
        "train.optimizer_steps_per_batch=1",
        "guard.spike=rollback",
        "run.checkpoint_every=4",
        "sync.audit_every=0",
        "algo=custom",
        "algo.name=planted_numbers:PlantedNumbers",
        f"algo.options={{action: spike, calls: [{SPIKE + 1}]}}",
        f"model.dtype={dtype}",
        "logger.progress=true",
    )
    output, _ = job.communicate(timeout=800)
    assert job.returncode == 0, output[-4000:]
    return {round(record["step"] or 0): record for record in read_metrics(root / "job")}


def trained_tokens(record: Record) -> float:
    names = (name for name in record if name.startswith("account/trained/"))
    return sum(record[name] or 0.0 for name in names)
