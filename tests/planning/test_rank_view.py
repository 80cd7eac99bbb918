import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.planning.rank_view import RankView


def test_pipeline_layers_by_hand() -> None:
    assert RankView.for_rank(8, ParallelSettings(pp=2), pp_rank=1).layers == ((4, 5, 6, 7),)
    view = RankView.for_rank(8, ParallelSettings(pp=2, vpp=2), pp_rank=1)
    assert view.layers == ((2, 3), (6, 7))


def test_uneven_stages_have_their_own_layers() -> None:
    parallel = ParallelSettings(pp=3)
    layers = [RankView.for_rank(8, parallel, pp_rank=stage).layers for stage in range(3)]
    assert layers == [((0, 1, 2),), ((3, 4, 5),), ((6, 7),)]


def test_sequences_are_padded_for_all_ranks_that_split_them() -> None:
    parallel = ParallelSettings(cp=2, tp=3)
    view = RankView.for_rank(8, parallel, cp_rank=1, tp_rank=2)
    assert (view.cp_rank, view.cp_size, view.sp_rank, view.sp_size) == (1, 2, 2, 3)
    assert view.row_multiple == 2 * 2 * 3
    assert RankView.for_rank(8, ParallelSettings(tp=3)).row_multiple == 3


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelSettings(pp=7), r"parallel\.pp"),
        (ParallelSettings(pp=2, vpp=4), r"2 stage\(s\) of 4 chunks"),
    ],
)
def test_layers_must_divide_over_stages_and_chunks(parallel: ParallelSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RankView.for_rank(6, parallel)


def test_ranks_default_to_zero() -> None:
    view = RankView.for_rank(8, ParallelSettings(pp=2, cp=2, tp=2))
    assert (view.layers, view.cp_rank, view.sp_rank) == (((0, 1, 2, 3),), 0, 0)


def test_moe_rows_skip_dense_layers() -> None:
    view = RankView.for_rank(4, ParallelSettings(pp=2), pp_rank=1)
    assert view.moe_rows((1, 2, 3)) == (1, 2)


def test_zigzag_by_hand() -> None:
    # Two sequences of 8 and 4 rows on two context-parallel ranks: 4 chunks of 2 rows and of 1 row
    cu_seqlens = np.array([0, 8, 12], np.int32)
    rank0 = RankView(layers=((0,),), cp_rank=0, cp_size=2).input_rows(cu_seqlens)
    rank1 = RankView(layers=((0,),), cp_rank=1, cp_size=2).input_rows(cu_seqlens)
    assert rank0.tolist() == [0, 1, 6, 7, 8, 11]
    assert rank1.tolist() == [2, 3, 4, 5, 9, 10]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_ranks_partition_the_rows(lengths: list[int], cp: int, tp: int) -> None:
    parallel = ParallelSettings(cp=cp, tp=tp)
    rows: list[int] = []
    num_rows = 0
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            view = RankView.for_rank(8, parallel, cp_rank=cp_rank, tp_rank=tp_rank)
            row_counts = [length * view.row_multiple for length in lengths]
            cu_seqlens = np.cumsum([0, *row_counts]).astype(np.int32)
            rows_of_rank = view.input_rows(cu_seqlens)
            num_rows = int(cu_seqlens[-1])
            assert len(rows_of_rank) == num_rows / (cp * tp)
            rows += rows_of_rank.tolist()
    assert sorted(rows) == list(range(num_rows))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("vpp", [1, 2])
def test_stages_partition_the_layers(pp: int, vpp: int) -> None:
    layers: list[int] = []
    for pp_rank in range(pp):
        chunks = RankView.for_rank(8, ParallelSettings(pp=pp, vpp=vpp), pp_rank=pp_rank).layers
        layers += [layer for chunk in chunks for layer in chunk]
    assert sorted(layers) == list(range(8))


def test_no_sequences_have_no_rows() -> None:
    rows = RankView(layers=((0,),)).input_rows(np.array([0], np.int32))
    assert rows.tolist() == []
    assert rows.dtype == np.int64


@pytest.mark.parametrize(
    ("view", "num_rows", "words"),
    [
        (RankView(layers=((0,),), sp_size=2), 3, "3 rows .* sequence-parallel .* pad"),
        (RankView(layers=((0,),), cp_size=2), 6, "6 rows .* context-parallel .* pad"),
    ],
)
def test_rows_that_do_not_divide_are_refused(view: RankView, num_rows: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        view.input_rows(np.array([0, num_rows], np.int32))
