"""The gradient of a global batch does not depend on its split.

A batch is split over ranks, pipeline stages and micro-batches, and packed in several orders.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import ParallelSettings
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("gradients_of_one_batch.py")
TOLERANCE = 1e-6  # relative to the gradient's norm, float32
# 24 rollouts, about 560 input tokens: one, two and five micro-batches, in different orders
ONE_RANK = ("dp:none:4096:0", "dp:none:320:1", "dp:none:130:2")
GRIDS = ("dp:none", "ep2:none", "ep2:full", "pp2:none", "pp2:full", "pp2_vpp2:full", "cp2:full")
# The groups of ESPO belong to a sequence, and only context parallelism splits sequences.
# test_whole_steps.py compares whole steps of every grid under one of the losses.
LOSSES = {"grpo": GRIDS, "espo": ("dp:none", "cp2:full")}
SPLITS = ("4096:0", "100:5")
# By loss: the cases of one rank, the first of which is the reference, and those of two ranks
Cases = dict[str, tuple[list[str], list[str]]]
ALL: Cases = {
    loss: (list(ONE_RANK), [f"{grid}:{split}" for grid in grids for split in SPLITS])
    for loss, grids in LOSSES.items()
}
DAILY: Cases = {
    "grpo": ([ONE_RANK[0], ONE_RANK[2]], ["ep2:none:100:5", "pp2_vpp2:full:100:5"]),
    "espo": ([ONE_RANK[0]], ["cp2:full:100:5"]),
}


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    difference = sum((left[name] - right[name]).double().square().sum() for name in left)
    norm = sum(tensor.double().square().sum() for tensor in left.values())
    return float((difference / norm).sqrt())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cases", [DAILY, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["daily", "all"]
)
def test_the_gradient_does_not_depend_on_the_split(
    megatron: Any, tmp_path: Path, cases: Cases
) -> None:
    from tests.distributed.gradients_of_one_batch import one_case

    names = [f"{loss}:{case}" for loss, (_, of_two_ranks) in cases.items() for case in of_two_ranks]
    torchrun(SCRIPT, str(tmp_path), *names, ranks=2)
    for loss, (of_one_rank, of_two_ranks) in cases.items():
        gradients = {
            f"1 rank {case}": one_case(f"{loss}:{case}", megatron, ParallelSettings())
            for case in of_one_rank
        }
        for case in of_two_ranks:
            file = tmp_path / f"{loss}:{case}.pt"
            gradients[f"2 ranks {case}"] = torch.load(file, weights_only=True)
        reference = gradients.pop(f"1 rank {of_one_rank[0]}")
        gates = [tensor for name, tensor in reference.items() if "gate" in name]
        assert all(gate.norm() > 0.0 for gate in gates), "routers and experts learn"
        differences = {
            name: relative_difference(reference, value) for name, value in gradients.items()
        }
        print(differences)
        assert max(differences.values()) <= TOLERANCE, differences
