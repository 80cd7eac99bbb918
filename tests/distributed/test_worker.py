"""One training step of two real ranks: exchange across nodes, agreement on NaN, skipped steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.rollout_files import read_rollouts
from support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("worker_steps.py")
CHECKPOINT = Path(__file__).parents[2] / "megatron_rl/models/assets/qwen3_moe_tiny_column_addition"

pytestmark = pytest.mark.distributed


def step(out: Path, scenario: str) -> dict[str, Any]:
    output = torchrun(SCRIPT, str(CHECKPOINT), str(out), scenario, ranks=2)
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_payloads_cross_nodes_and_the_step_trains(tmp_path: Path) -> None:
    result = step(tmp_path, "finite")
    assert result["finite"] and result["optimizer_steps"] == 2
    assert result["metrics"]["train/grad_norm"] > 0.0
    assert 0.0 <= result["metrics"]["mismatch/route_disagreement"] <= 1.0
    assert result["metrics"]["policy/entropy"] > 0.0


@pytest.mark.parametrize("scenario", ["nan_on_rank_1", "nan_logits_on_rank_1"])
def test_a_nan_on_one_rank_stops_every_rank_and_the_batch_is_saved(tmp_path: Path, scenario: str) -> None:
    result = step(tmp_path, scenario)
    assert not result["finite"] and result["optimizer_steps"] == 0
    saved = [read_rollouts(tmp_path / "nonfinite-step-3" / f"rank-{rank}.bin") for rank in (0, 1)]
    assert sorted(r.rollout_id for part in saved for r in part) == [f"t{i}" for i in range(9)]


def test_nothing_to_train_is_skipped_by_all(tmp_path: Path) -> None:
    assert step(tmp_path, "skipped")["finite"]
