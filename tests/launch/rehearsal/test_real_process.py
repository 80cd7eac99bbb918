"""A rehearsal's memory against a real process, which runs the same rank on the CPU.

Compared are all phases of the step, and the sum of all kinds: a process cannot tell them apart.
Both sides pad sequences for attention, because CPUs have no variable-length kernel.
Tensors fill most of the process: it holds 20 million parameters and 4096 rows of a micro-batch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.policies import TWO_DIGIT_ADDITION

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("one_rank.py")
TOLERANCE = 0.05
# The tiny model with larger tensors
SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "vocab_size": 4096,
    "num_hidden_layers": 3,
}
# glibc returns freed memory to the kernel at once
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


def run(mode: str, folder: Path, settings: list[str]) -> dict[str, dict[str, int]]:
    file = folder / f"{mode}.json"
    result = subprocess.run(
        [sys.executable, SCRIPT, mode, file, *settings],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    memory: dict[str, dict[str, int]] = json.loads(file.read_text())
    return memory


def write_model(folder: Path) -> None:
    """Write the configuration of a model of `SIZES`, and its tokenizer."""
    source = Path(TWO_DIGIT_ADDITION)
    for file in source.iterdir():
        if file.name.startswith("tokenizer"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SIZES))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rehearsal_predicts_the_memory_of_a_real_process(
    tmp_path: Path, dtype: str, recompute: str
) -> None:
    write_model(tmp_path)
    settings = [
        "experiment=smoke",
        "model=hf",
        "model.init=random",
        "model.spec=local",
        f"model.path={tmp_path}",
        f"model.dtype={dtype}",
        f"model.recompute={recompute}",
        "engine=external",
        "engine.urls=[http://10.0.0.7:30000]",
        "train.tokens_per_micro_batch=4096",
        "rollout.max_new_tokens=500",
    ]
    estimate = run("rehearsal", tmp_path, settings)
    reality = run("process", tmp_path, settings)
    static = sum(estimate["setup"][kind] for kind in ("weights", "gradients", "optimizer"))
    for phase in ("old policy", "update"):
        growth = sum(estimate[phase].values()) - static
        assert growth == pytest.approx(reality[phase]["allocator"], rel=TOLERANCE)
        assert growth == pytest.approx(reality[phase]["process"], rel=TOLERANCE)
    peak = reality["model"]["process"] + reality["update"]["process"]
    assert sum(estimate["update"].values()) == pytest.approx(peak, rel=TOLERANCE)
