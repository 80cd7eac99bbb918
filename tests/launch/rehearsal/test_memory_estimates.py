"""`planning/memory.py` against rehearsals of whole ranks, kind by kind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape
from megatron_rl.planning.memory import RankMemory, rank_memory
from tests.support.policies import TWO_DIGIT_ADDITION

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "tests/support/published"
TOLERANCE = 0.05
SETTINGS = (
    "experiment=smoke",
    "model.spec=local",
    "engine=external",
    "engine.urls=[http://10.0.0.7:30000]",
    "train.tokens_per_micro_batch=4096",
    "rollout.max_new_tokens=3072",
)


def published_model(folder: Path, name: str, layers: int) -> str:
    """A published model with fewer layers, and the tokenizer of a tiny one."""
    for file in Path(TWO_DIGIT_ADDITION).iterdir():
        if file.name.startswith("tokenizer"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((PUBLISHED / name / "config.json").read_text())
    # The end of a sequence is the tiny tokenizer's
    changes = {"num_hidden_layers": layers, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def rehearse(tmp_path: Path, rank: int, ranks: int, *settings: str) -> tuple[Any, RankMemory]:
    """Rehearse a rank. Returns its report and the estimate."""
    file = tmp_path / "report.json"
    settings = (*SETTINGS, *settings)
    options = (f"rank={rank}", f"ranks={ranks}", f"out={file}", "gpu=b200")
    result = subprocess.run(
        [sys.executable, "-m", "launch.rehearsal", *options, *settings],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert file.exists(), result.stderr[-2000:]
    facts = LaunchFacts(world_size=ranks, local_world_size=min(8, ranks), num_gpus=8)
    c = compose(settings, facts=facts)
    report = json.loads(file.read_text())
    shape = read_shape(c.model.path)
    return report, rank_memory(c, shape, world_size=ranks, stage=report["pipeline_stage"])


def compare(report: Any, plan: RankMemory) -> None:
    """Require each kind, and the sum, to differ by at most 5 %."""
    update = report["memory"]["update"]
    estimates = {
        "weights": plan.parameters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations + plan.logits,
    }
    differences = {kind: size / update[kind] - 1 for kind, size in estimates.items()}
    total = sum(estimates.values()) / sum(update[kind] for kind in estimates) - 1
    assert abs(total) <= TOLERANCE, (total, differences)
    assert max(map(abs, differences.values())) <= TOLERANCE, differences


@pytest.mark.parametrize(
    ("rank", "parallel", "recompute", "dtype"),
    [
        (3, "pp2_ep8", "full", "bfloat16"),
        (15, "pp2_ep8", "full", "bfloat16"),
        (3, "pp2_ep8", "none", "bfloat16"),
        (3, "pp2_ep8", "full", "float32"),
        (5, "ep8", "full", "bfloat16"),
    ],
)
def test_estimates_of_qwen3_30b_a3b(
    tmp_path: Path, rank: int, parallel: str, recompute: str, dtype: str
) -> None:
    model = published_model(tmp_path, "qwen3_30b_a3b", layers=4)
    settings = (
        "model=hf",
        "model.init=random",
        f"model.path={model}",
        f"parallel={parallel}",
        f"model.recompute={recompute}",
        f"model.dtype={dtype}",
    )
    compare(*rehearse(tmp_path, rank, 16, *settings))


def test_estimates_of_qwen3_235b_a22b(tmp_path: Path) -> None:
    """Tensor parallelism splits attention and rows; 16 ranks share the experts."""
    model = published_model(tmp_path, "qwen3_235b_a22b", layers=16)
    settings = (
        "model=hf",
        "model.init=random",
        f"model.path={model}",
        "parallel=tp4_pp8_ep16",
        "model.recompute=full",
        "model.dtype=bfloat16",
    )
    compare(*rehearse(tmp_path, 64, 128, *settings))
