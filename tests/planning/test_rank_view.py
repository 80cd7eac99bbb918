import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.planning.rank_view import RankView


def test_pipeline_layers_by_hand() -> None:
    assert RankView.of(8, ParallelSettings(pp=2), pp_rank=1).layers == ((4, 5, 6, 7),)
    assert RankView.of(8, ParallelSettings(pp=2, vpp=2), pp_rank=1).layers == ((2, 3), (6, 7))
    with pytest.raises(ValueError, match=r"parallel\.pp"):
        RankView.of(6, ParallelSettings(pp=4))


def test_moe_rows_skip_dense_layers() -> None:
    view = RankView.of(4, ParallelSettings(pp=2), pp_rank=1)
    assert view.moe_rows((1, 2, 3)) == (1, 2)


def test_zigzag_by_hand() -> None:
    # two sequences of 8 and 4 rows over two context ranks: 4 chunks of 2 rows and of 1 row
    cu_seqlens = np.array([0, 8, 12], np.int32)
    rank0 = RankView(layers=((0,),), cp_rank=0, cp_size=2).input_rows(cu_seqlens)
    rank1 = RankView(layers=((0,),), cp_rank=1, cp_size=2).input_rows(cu_seqlens)
    assert rank0.tolist() == [0, 1, 6, 7, 8, 11]
    assert rank1.tolist() == [2, 3, 4, 5, 9, 10]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
)
def test_rows_and_layers_partition(lengths: list[int], cp: int, tp: int, pp: int, vpp: int) -> None:
    rows: list[int] = []
    layers: list[int] = []
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            parallel = ParallelSettings(cp=cp, tp=tp, sequence_parallel=tp > 1)
            view = RankView.of(8, parallel, cp_rank=cp_rank, tp_rank=tp_rank)
            padded = np.cumsum([0] + [n * view.row_multiple for n in lengths]).astype(np.int32)
            rows += view.input_rows(padded).tolist()
    for pp_rank in range(pp):
        held = RankView.of(8, ParallelSettings(pp=pp, vpp=vpp), pp_rank=pp_rank).layers
        layers += [layer for chunk in held for layer in chunk]
    assert sorted(rows) == list(range(int(padded[-1])))
    assert sorted(layers) == list(range(8))


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="pad the batch"):
        RankView.of(2, ParallelSettings(tp=2, sequence_parallel=True)).input_rows(
            np.array([0, 3], np.int32)
        )
    with pytest.raises(ValueError, match="context-parallel"):
        RankView(layers=((0,),), cp_size=2).input_rows(np.array([0, 6], np.int32))
