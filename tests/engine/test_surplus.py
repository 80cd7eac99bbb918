"""Real engines abort the surplus of a step, and each of its tokens is in one class."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparable import assert_same_weights
from tests.support.exactness import EXACT
from tests.support.jobs import start_job

STEPS = 3

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def run_whole(root: Path, *settings: str) -> tuple[Path, list[dict[str, Any]]]:
    job = start_job(root, *settings)
    output, _ = job.communicate(timeout=1200)
    assert job.returncode == 0, output[-4000:]
    text = (root / "job/metrics.jsonl").read_text()
    return root / "job", [json.loads(line) for line in text.splitlines()]


def total(records: list[dict[str, Any]], name: str) -> float:
    return sum(record.get(name, 0.0) for record in records)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_aborts_its_surplus_trains_the_same_weights(
    tmp_path: Path, dtype: str, staleness: int
) -> None:
    """Few requests run at a time, so that many are aborted."""
    settings = (
        f"model.dtype={dtype}",
        f"rollout.max_staleness={staleness}",
        "selection=oversample",
        f"train.total_steps={STEPS}",
        "run.save_weights=true",
    )
    whole_run, records = run_whole(tmp_path / "finished", *settings)
    short_run, short_records = run_whole(
        tmp_path / "aborted", *settings, "selection.surplus=abort", "engine.max_running_requests=5"
    )
    assert_same_weights(whole_run, short_run, STEPS)
    for name in ("account/trained/mixed", "select/prompts", "select/rounds"):
        assert total(records, name) == total(short_records, name)
    assert total(short_records, "account/surplus_aborted") > 0
    assert total(short_records, "account/generated") < total(records, "account/generated")
    for record in (*records, *short_records):
        assert record["account/unaccounted"] == 0.0
