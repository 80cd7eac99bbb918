"""Real engines continue a response after each check as if nothing had stopped them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparable import assert_same_weights
from tests.support.exactness import EXACT
from tests.support.jobs import start_job

STEPS = 2

pytestmark = [
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def run_whole(root: Path, *settings: str) -> tuple[Path, list[dict[str, Any]]]:
    job = start_job(
        root, *settings, f"train.total_steps={STEPS}", "run.save_weights=true", "eval.every=0"
    )
    output, _ = job.communicate(timeout=1200)
    assert job.returncode == 0, output[-4000:]
    text = (root / "job/metrics.jsonl").read_text()
    return root / "job", [json.loads(line) for line in text.splitlines()][1:]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_checks_change_no_bit_and_a_low_threshold_stops_responses(
    tmp_path: Path, dtype: str
) -> None:
    checks = ("rollout.stop_repetition_ngram=1", "rollout.stop_repetition_every=2")
    whole_run, records = run_whole(tmp_path / "whole", f"model.dtype={dtype}")
    same_run, same_records = run_whole(
        tmp_path / "same", f"model.dtype={dtype}", "rollout.stop_repetition=0.97", *checks
    )
    assert_same_weights(whole_run, same_run, STEPS)
    _, short_records = run_whole(
        tmp_path / "short", f"model.dtype={dtype}", "rollout.stop_repetition=0.3", *checks
    )
    for record, same, short in zip(records, same_records, short_records, strict=True):
        assert "rollout/stopped_repetition" not in record.keys() | same.keys()
        assert record["rollout/tokens"] == same["rollout/tokens"]
        assert 0.0 < short["rollout/stopped_repetition"] <= short["rollout/truncated"]
        for any_record in (record, same, short):
            assert any_record["account/unaccounted"] == 0.0
    assert short_records[0]["rollout/tokens"] < records[0]["rollout/tokens"]
