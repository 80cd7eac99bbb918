"""Edge cases of micro-batches: the device, real rows, and a wrong number of advantages."""

import pytest
import torch

from megatron_rl.planning.rank_view import RankView
from megatron_rl.training.micro_batches import Batcher
from tests.training.test_micro_batches import FIVE, SHAPE, THREE, WHOLE, pack


def test_tensors_are_on_the_requested_device() -> None:
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
    real_rows = pack(
        [FIVE], [1.0], RankView(layers=((0, 1, 2),), sp_rank=1, sp_size=2)
    ).inputs.real_rows
    assert real_rows is not None and real_rows.dtype == torch.bool
    assert real_rows.tolist() == [True, True, False]
