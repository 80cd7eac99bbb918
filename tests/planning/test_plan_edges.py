"""Plans at their edges: what fills a micro-batch exactly, one trainable token, and numbers that do
not match.
"""

import numpy as np
import pytest

from megatron_rl.config.schema import ParallelSettings, TrainSettings
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_planner import StepPlanner
from tests.planning.test_step_planner import plan, planner, rollout


def test_rollouts_that_fill_a_micro_batch_exactly_share_it() -> None:
    (micro_batches,) = (
        plan([25, 15], dp_size=1, optimizer_steps=1, tokens=40).optimizer_steps[0].micro_batches
    )
    assert [len(batch) for batch in micro_batches] == [2]
    (micro_batches,) = (
        plan([25, 16], dp_size=1, optimizer_steps=1, tokens=40).optimizer_steps[0].micro_batches
    )
    assert [len(batch) for batch in micro_batches] == [1, 1]


def test_one_trainable_token_is_enough() -> None:
    result = planner().plan(7, [rollout(0, 5, trainable=1)], [1.0])
    assert (len(result.rollouts), result.step) == (1, 7)


@pytest.mark.parametrize("advantages", [[1.0], [1.0, 1.0, 1.0]])
def test_every_rollout_needs_its_advantage(advantages: list[float]) -> None:
    with pytest.raises(ValueError, match="zip"):
        planner().plan(0, [rollout(0, 5), rollout(1, 5)], advantages)


def test_without_virtual_stages_any_number_of_micro_batches_will_do() -> None:
    whole = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(pp=4), dp_size=1, seed=0)
    assert len(whole.plan(0, [rollout(0, 5)], [1.0]).optimizer_steps[0].micro_batches[0]) == 1


def test_layers_that_do_not_divide_over_virtual_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"over 2 stage\(s\) of 2 chunks each"):
        RankView.of(6, ParallelSettings(pp=2, vpp=2))


def test_the_first_rank_is_meant_where_none_is_said() -> None:
    view = RankView.of(8, ParallelSettings(pp=2, cp=2, tp=2, sequence_parallel=True))
    assert (view.layers, view.cp_rank, view.sp_rank) == (((0, 1, 2, 3),), 0, 0)


def test_tensor_parallelism_alone_splits_no_rows() -> None:
    view = RankView.of(2, ParallelSettings(tp=2), tp_rank=1)
    assert (view.sp_rank, view.sp_size, view.row_multiple) == (0, 1, 1)


def test_no_sequences_have_no_rows() -> None:
    rows = RankView(layers=((0,),)).input_rows(np.array([0], np.int32))
    assert (rows.tolist(), rows.dtype) == ([], np.int64)
