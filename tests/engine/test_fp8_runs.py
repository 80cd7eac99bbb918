"""Whole runs with FP8 engines: two ranks of trainers or engines, and bfloat16 engines before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.run.checkpoints.state_file import read_state
from tests.engine.test_fp8_engine import write_model
from tests.engine.test_sharded_fp8_engine import SIZES
from tests.support.jobs import ROOT, start_job

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(600)]

FP8 = ("model=fp8_tiny", "credit.all_incorrect=zvp", "sync.audit_every=1")
# Of each layer: qkv, o, w13 and w2 with their codes and scales, four norms and the router
NUM_PARAMETERS = 4 * (3 * 4 + 5) + 3


def complete(root: Path, *overrides: str, ranks: int = 1) -> tuple[list[dict[str, float]], str]:
    """Complete a run; returns its records and its output."""
    job = start_job(root, *overrides, ranks=ranks)
    output, _ = job.communicate(timeout=550)
    assert job.returncode == 0, output[-4000:]
    lines = (root / "job/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], output


def require_audits(records: list[dict[str, float]], count: int = NUM_PARAMETERS) -> None:
    """Require that every sync was audited by value, and found nothing."""
    for record in records:
        assert record["sync/audit_mismatches"] == 0
        assert record["sync/audit_compared"] == count


@pytest.mark.distributed
def test_a_resumed_run_compares_fp8_with_its_own_bfloat16_steps(tmp_path: Path) -> None:
    """Two expert-parallel ranks, whose first step has bfloat16 engines."""
    settings = (*FP8, "parallel=ep2", "run.checkpoint_every=1")
    first, _ = complete(
        tmp_path, *settings, "engine.dtype=bfloat16", "train.total_steps=1", ranks=2
    )
    assert "mismatch/bf16/k3_kl" not in first[-1]
    assert first[-1]["mismatch/k3_kl"] > 0
    state = read_state(tmp_path / "job/checkpoints/iter_0000001").position
    assert state.features["alarms"] == {"steps": 1, "k3_sum": first[-1]["mismatch/k3_kl"]}
    options = (
        "engine.quantization=fp8",
        "train.total_steps=3",
        "run.resume=auto",
        "logger.progress=true",
    )
    records, output = complete(tmp_path, *settings, *options, ranks=2)
    last_records = records[-2:]
    assert [record["step"] for record in last_records] == [2, 3]
    require_audits(last_records)
    for record in last_records:
        assert record["train/samples"] > 0
        assert record["mismatch/bf16/k3_kl"] == first[-1]["mismatch/k3_kl"]
    print([(r["mismatch/k3_kl"], r["mismatch/bf16/k3_kl"]) for r in last_records])
    exceeds = any(r["mismatch/k3_kl"] > 5 * r["mismatch/bf16/k3_kl"] for r in last_records)
    assert ("the mean of 1 earlier step(s) of this run" in output) == exceeds


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "grid",
    [("parallel.pp=2",), ("parallel.tp=2",)],
    ids=["pp2", "tp2"],
)
def test_engines_of_pipelines_and_shards_hold_what_was_quantized(
    tmp_path: Path, grid: tuple[str, ...], dtype: str
) -> None:
    options = ("engine.quantization=fp8", f"model.dtype={dtype}", "train.total_steps=1")
    records, _ = complete(tmp_path, *FP8, *options, *grid, ranks=2)
    assert len(records) == 2 and records[-1]["train/samples"] > 0
    require_audits(records)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_an_fp8_engine_of_two_ranks(tmp_path: Path, dtype: str) -> None:
    model = write_model(tmp_path / "model", **SIZES)
    for file in (ROOT / "megatron_rl/models/assets/qwen3_moe_fp8_blank").glob("token*"):
        shutil.copy(file, model)
    options = ("engine.quantization=fp8", "engine.tp=2", f"model.dtype={dtype}")
    records, _ = complete(
        tmp_path / "runs",
        "model=hf",
        f"model.path={model}",
        "model.recompute=none",
        *FP8[1:],
        *options,
        "train.total_steps=2",
    )
    assert len(records) == 3 and records[-1]["train/samples"] > 0
    # One layer fewer than in fp8_tiny
    require_audits(records, NUM_PARAMETERS - (3 * 4 + 5))
