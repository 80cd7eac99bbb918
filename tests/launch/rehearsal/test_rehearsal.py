"""Rehearsals of whole ranks, each in a process of its own: they replace parts of torch."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.models.families import read_shape
from megatron_rl.planning.memory import rank_parameters
from tests.support.policies import TWO_DIGIT_ADDITION

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[3]
SHAPE = read_shape(TWO_DIGIT_ADDITION)
ENGINES = ("engine=external", "engine.urls=[http://10.0.0.7:30000]")
SETTINGS = (
    "experiment=smoke",
    "model.spec=local",
    "train.tokens_per_micro_batch=256",
    "rollout.max_new_tokens=48",
    *ENGINES,
)


def run(*arguments: str, plugins: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command. plugins: the folder of a user's own modules."""
    return subprocess.run(
        [sys.executable, "-m", "launch.rehearsal", *arguments, *SETTINGS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(plugins)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def rehearse(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    result = run(f"out={file}", *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def messages(report: dict[str, Any], name: str) -> list[tuple[str, int]]:
    """Dtype and bytes of the messages that a stage sends or receives in a step, sorted."""
    return sorted(
        (entry["dtype"], entry["num_bytes"])
        for entry in report["collectives"]
        if entry["name"] == name and entry["phase"] in ("old policy", "update")
    )


def count(report: dict[str, Any], phase: str, name: str) -> int:
    calls = Counter((entry["phase"], entry["name"]) for entry in report["collectives"])
    return calls[phase, name]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_an_expert_parallel_rank_holds_what_arithmetic_says(tmp_path: Path, dtype: str) -> None:
    report = rehearse(
        tmp_path, "rank=1", "ranks=2", "parallel=ep2", f"model.dtype={dtype}", "micro_batches=3"
    )
    parameters = rank_parameters(SHAPE, ParallelSettings(ep=2), 0)
    assert report["parameters"] == parameters.total
    peak = report["memory"]["update"]
    size = 2 if dtype == "bfloat16" else 4
    # Buffers round each of a hundred tensors up to whole blocks of memory
    assert peak["weights"] == pytest.approx(size * parameters.total, rel=0.05)
    assert peak["gradients"] == pytest.approx(4 * parameters.total, rel=0.05)
    share = parameters.dense / 2 + parameters.experts
    state = 12 if dtype == "bfloat16" else 8
    assert peak["optimizer"] == pytest.approx(state * share, rel=0.05)
    # Each MoE layer exchanges tokens, their weights and the results: three times a pass
    exchanges = 3 * len(SHAPE.moe_layers) * report["micro_batches"]
    assert report["micro_batches"] == 3
    assert count(report, "old policy", "alltoall_base_") == exchanges
    assert count(report, "update", "alltoall_base_") == 2 * exchanges


@pytest.mark.nightly
def test_messages_between_pipeline_stages_match(tmp_path: Path) -> None:
    """The first stage sends what the last one receives, and the other way round."""
    stages = [
        rehearse(tmp_path, f"rank={rank}", "ranks=2", "parallel=pp2", "model.dtype=bfloat16")
        for rank in (0, 1)
    ]
    first, last = stages
    assert messages(first, "send") == messages(last, "recv_") != []
    assert messages(last, "send") == messages(first, "recv_") != []


@pytest.mark.nightly
def test_skewed_routes_need_more_memory_on_the_rank_of_the_popular_experts(tmp_path: Path) -> None:
    peaks = []
    for routing in ("balanced", "skewed"):
        report = rehearse(
            tmp_path, "rank=0", "ranks=2", "parallel=ep2", f"routing={routing}", "micro_batches=1"
        )
        peaks.append(report["memory"]["update"]["activations"])
    assert peaks[1] > 1.05 * peaks[0]


def test_a_loss_that_mixes_devices_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from megatron_rl.losses import LossResult\n"
        "class Loss:\n"
        "    def prepare(self, responses):\n"
        "        weights = torch.ones(len(responses.advantages))\n"
        "        def objective(logprobs, denominators):\n"
        "            return LossResult(loss=-(logprobs * weights).sum(), sums={}, maxima={})\n"
        "        return objective\n"
    )
    result = run(
        "rank=0", "ranks=2", "parallel=ep2", "algo=custom", "algo.name=mine:Loss", plugins=tmp_path
    )
    assert result.returncode == 2
    assert "mine:Loss" in result.stderr
    assert "at least two devices, cuda:0 and cpu" in result.stderr
