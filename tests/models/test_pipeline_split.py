"""Splits of layers over pipeline stages equal Megatron's."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_rl.mcore import compat
from megatron_rl.models.pipeline_split import PipelineSplit

compat.install()


def test_known_splits() -> None:
    assert PipelineSplit(8, 2).layers() == (((0, 1, 2, 3),), ((4, 5, 6, 7),))
    assert PipelineSplit(8, 2, 2).layers() == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert PipelineSplit(8, 3, first=2, last=2).layers() == (((0, 1),), ((2, 3, 4, 5),), ((6, 7),))
    assert PipelineSplit(5, 2, last=2).layers() == (((0, 1, 2),), ((3, 4),))
    assert PipelineSplit(12, 2, 2, first=4).layers() == (
        ((0, 1), (6, 7)),
        ((2, 3, 4, 5), (8, 9, 10, 11)),
    )


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "sizes"),
    [
        (48, 4, 1, [12, 12, 12, 12]),
        (94, 8, 1, [11, 12, 12, 12, 12, 12, 12, 11]),
        (9, 4, 1, [2, 3, 3, 1]),
        (5, 4, 1, [2, 1, 1, 1]),
        (5, 2, 1, [3, 2]),
        (12, 2, 2, [6, 6]),
        (10, 2, 2, [6, 4]),
        (16, 3, 2, [6, 6, 4]),
        (7, 1, 1, [7]),
    ],
)
def test_layers_that_do_not_divide_are_fewer_at_the_ends(
    num_layers: int, stages: int, chunks: int, sizes: list[int]
) -> None:
    layers = PipelineSplit.balanced(num_layers, stages, chunks).layers()
    assert [sum(map(len, stage)) for stage in layers] == sizes


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        (PipelineSplit(6, 4), "the 6 layers do not divide over 4 stage"),
        (PipelineSplit.balanced(3, 4), "the 3 layers do not divide over 4 stage"),
        (PipelineSplit.balanced(5, 2, 2), "of 2 chunks each"),
        (PipelineSplit(6, 2, 2), "of 2 chunks each"),
        (
            PipelineSplit(6, 2, first=6),
            "the 0 layers that the first and last stage leave do not divide over 1 stage",
        ),
        (PipelineSplit(6, 2, first=2, last=3), "the 1 layers"),
        (PipelineSplit(6, 3, first=7), "the -1 layers"),
        (PipelineSplit(7, 2, 2, first=3), "3 layers do not divide into 2 chunks"),
        (PipelineSplit(4, 2, 2, first=2, last=2), "accept only one of the first and last"),
        (PipelineSplit(6, 1, last=6), "a single pipeline stage holds every layer"),
    ],
)
def test_impossible_splits_are_named(split: PipelineSplit, problem: str) -> None:
    assert problem in split.problem()
    with pytest.raises(ValueError, match=r"parallel\.pp="):
        split.layers()


@st.composite
def splits(draw: st.DrawFn) -> PipelineSplit:
    """Draw a possible split."""
    stages = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    share = st.integers(1, 3).map(lambda layers: layers * chunks)
    first, last = (draw(st.none() | share) if stages > 1 else None for _ in range(2))
    sizes = [size for size in (first, last) if size is not None]
    assume(chunks == 1 or len(sizes) < stages)
    num_layers = sum(sizes) + (stages - len(sizes)) * draw(share)
    return PipelineSplit(num_layers, stages, chunks, first, last)


@st.composite
def balanced_splits(draw: st.DrawFn) -> PipelineSplit:
    stages = draw(st.integers(1, 8))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    return PipelineSplit.balanced(draw(st.integers(stages, 40)) * chunks, stages, chunks)


@given(split=splits() | balanced_splits())
def test_megatron_splits_layers_in_the_same_way(split: PipelineSplit) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    assert split.problem() == ""
    chunks = split.chunks
    config: Any = TransformerConfig(
        num_layers=split.num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=split.stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
    )
    for stage, chunks_of_stage in enumerate(split.layers()):
        for chunk, layers in enumerate(chunks_of_stage):
            virtual = chunk if chunks > 1 else None
            start = get_transformer_layer_offset(config, vp_stage=virtual, pp_rank=stage)
            size = get_num_layers_to_build(config, vp_stage=virtual, pp_rank=stage)
            assert layers == tuple(range(start, start + size))
