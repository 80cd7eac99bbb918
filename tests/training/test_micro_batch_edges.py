"""Batches at their edges: the device, rows that are real, and advantages that do not match."""

import pytest
import torch

from megatron_rl.planning.rank_view import RankView
from megatron_rl.training.micro_batches import Batcher
from tests.training.test_micro_batches import FIVE, SHAPE, THREE, WHOLE, pack


def test_tensors_are_on_the_device_that_was_asked_for() -> None:
    batch = Batcher(WHOLE, SHAPE, torch.device("meta")).pack([FIVE], [0.5])
    tensors = [
        batch.inputs.input_ids,
        batch.inputs.position_ids,
        batch.inputs.cu_seqlens,
        batch.inputs.routes,
    ]
    tensors += [
        batch.inputs.real_rows,
        batch.rows,
        batch.targets,
        batch.rollout_logprobs,
        batch.advantages,
    ]
    assert {
        None if tensor is None else tensor.device.type for tensor in [*tensors, batch.cu_seqlens]
    } == {"meta"}


@pytest.mark.parametrize("advantages", [[1.0], [1.0, 1.0, 1.0]])
def test_every_rollout_needs_its_advantage(advantages: list[float]) -> None:
    with pytest.raises(ValueError, match="zip"):
        pack([FIVE, THREE], advantages)


def test_real_rows_are_a_mask_and_not_indices() -> None:
    real = pack([FIVE], [1.0], RankView(layers=((0, 1, 2),), sp_rank=1, sp_size=2)).inputs.real_rows
    assert real is not None and real.dtype == torch.bool
    assert real.tolist() == [True, True, False]
