"""One global batch has one gradient, however it is split over ranks, micro-batches and packing orders."""

from pathlib import Path

import pytest
import torch

from megatron_rl.models.qwen3_moe import read_shape
from support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("gradients_of_one_batch.py")
CHECKPOINT = Path(__file__).parents[2] / "megatron_rl/models/assets/qwen3_moe_tiny_column_addition"
TOLERANCE = 1e-6  # relative to the gradient's norm, float32


def gradients(
    out: Path, ranks: int, ep: int, loss: str, recompute: str, *variants: str
) -> dict[str, dict[str, torch.Tensor]]:
    out.mkdir(parents=True)
    torchrun(SCRIPT, str(CHECKPOINT), str(out), str(ep), loss, recompute, *variants, ranks=ranks)
    return {file.stem: torch.load(file, weights_only=True) for file in out.glob("*.pt")}


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    difference = sum((left[name] - right[name]).double().square().sum() for name in left)
    norm = sum(tensor.double().square().sum() for tensor in left.values())
    return float((difference / norm).sqrt())


@pytest.mark.distributed
@pytest.mark.parametrize("loss", ["grpo", "espo"])
def test_same_gradient_whatever_the_split(loss: str, tmp_path: Path) -> None:
    assert read_shape(CHECKPOINT).num_experts == 8
    # 24 samples, about 560 input tokens: one, two and five micro-batches, each packed in another order
    single = gradients(tmp_path / "one", 1, 1, loss, "none", "4096:0", "320:1", "130:2")
    reference = single.pop("4096-0")
    assert float(sum(t.square().sum() for t in reference.values())) > 0.0
    others = {f"1 rank {name}": value for name, value in single.items()}
    for name, ep, recompute in (("dp2", 1, "none"), ("ep2", 2, "none"), ("ep2 recompute", 2, "full")):
        split = gradients(tmp_path / name.replace(" ", "-"), 2, ep, loss, recompute, "4096:0", "100:5")
        others |= {f"{name} {variant}": value for variant, value in split.items()}
    differences = {name: relative_difference(reference, value) for name, value in others.items()}
    print(differences)
    assert max(differences.values()) <= TOLERANCE, differences
