"""One global batch has one gradient, however it is split over ranks, stages, micro-batches and
packing orders.
"""

from pathlib import Path

import pytest
import torch

from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("gradients_of_one_batch.py")
TOLERANCE = 1e-6  # relative to the gradient's norm, float32
# 24 rollouts, about 560 input tokens: one, two and five micro-batches, each packed in another order
ONE_RANK = ("dp:none:4096:0", "dp:none:320:1", "dp:none:130:2")
GRIDS = ("dp:none", "ep2:none", "ep2:full", "pp2:none", "pp2:full", "pp2_vpp2:full", "cp2:full")
# ESPO's groups are a sequence's: of all grids only context parallelism shares those. Every grid's
# whole steps are compared with exact ones in test_whole_steps.py, under one loss or the other.
LOSSES = {"grpo": GRIDS, "espo": ("dp:none", "cp2:full")}


def two_ranks(loss: str) -> list[str]:
    return [f"{grid}:{split}" for grid in LOSSES[loss] for split in ("4096:0", "100:5")]


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    difference = sum((left[name] - right[name]).double().square().sum() for name in left)
    norm = sum(tensor.double().square().sum() for tensor in left.values())
    return float((difference / norm).sqrt())


@pytest.mark.distributed
def test_same_gradient_whatever_the_split(tmp_path: Path) -> None:
    alone = [f"{loss}:{case}" for loss in LOSSES for case in ONE_RANK]
    shared = [f"{loss}:{case}" for loss in LOSSES for case in two_ranks(loss)]
    for ranks, names in ((1, alone), (2, shared)):
        (tmp_path / str(ranks)).mkdir()
        torchrun(SCRIPT, str(tmp_path / str(ranks)), *names, ranks=ranks)
    for loss in LOSSES:
        files = {
            f"{file.parent.name} rank(s) {file.stem}": file
            for file in tmp_path.glob(f"*/{loss}:*.pt")
        }
        gradients = {name: torch.load(file, weights_only=True) for name, file in files.items()}
        assert len(gradients) == len(ONE_RANK) + len(two_ranks(loss))
        reference = gradients.pop(f"1 rank(s) {loss}:{ONE_RANK[0]}")
        assert all(t.norm() > 0.0 for name, t in reference.items() if "gate" in name), (
            "routers and experts learn"
        )
        differences = {
            name: relative_difference(reference, value) for name, value in gradients.items()
        }
        print(differences)
        assert max(differences.values()) <= TOLERANCE, differences
