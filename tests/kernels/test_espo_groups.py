"""Exact group sizes, ties, clip widths."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espo_kernels import espo_groups
from tests.kernels.batches import fraction_lists, ragged_lengths, response_batch, seeds

BACKENDS = ["reference", "cpu"]


def one_sequence(entropies: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(entropies), torch.tensor([0, len(entropies)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("n", "fraction", "k"),
    [
        (1, 0.2, 1),
        (5, 0.2, 1),
        (6, 0.2, 2),
        (10, 0.2, 2),
        (100, 0.07, 7),
        (3, 1 / 3, 1),
        (50, 0.58, 29),
        (1000, 0.001, 1),
    ],
)
def test_group_size_is_exact(backend: str, n: int, fraction: float, k: int) -> None:
    """0.07 · 100 is 7.000000000000001 in binary; the group still has 7 tokens."""
    groups = espo_groups(*one_sequence([1.0] * n), vocab_size=9, fractions=(fraction,), backend=backend)
    assert groups.count.tolist() == [[k, n - k]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_earlier_position(backend: str) -> None:
    groups = espo_groups(*one_sequence([0.5, 2.0, 0.5, 2.0, 2.0]), vocab_size=9, fractions=(0.4,), backend=backend)
    assert groups.group_id.tolist() == [1, 0, 1, 0, 1]
    zeros = espo_groups(*one_sequence([-0.0, 0.0, -0.0, 0.0]), vocab_size=9, fractions=(0.5,), backend=backend)
    assert zeros.group_id.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip_width_follows_the_entropy(backend: str) -> None:
    entropies, cu_seqlens = one_sequence([3.0, 1.0, 0.0, 0.0, 0.0])
    options = {"vocab_size": 100, "alpha": 0.02, "backend": backend}
    adaptive = espo_groups(entropies, cu_seqlens, **options)
    expected = [[0.02 * 3.0 / math.log(100), 0.02 * 0.25 / math.log(100)]]
    torch.testing.assert_close(adaptive.clip, torch.tensor(expected))
    floored = espo_groups(entropies, cu_seqlens, min_clip=0.01, **options)
    torch.testing.assert_close(floored.clip, torch.tensor([[expected[0][0], 0.01]]))
    fixed = espo_groups(entropies, cu_seqlens, fixed_clip=0.2, **options)
    torch.testing.assert_close(fixed.clip, torch.full((1, 2), 0.2))
    ungrouped = espo_groups(entropies, cu_seqlens, fractions=(), **options)
    torch.testing.assert_close(ungrouped.clip, torch.tensor([[0.02 * 0.8 / math.log(100)]]))
    assert not ungrouped.group_id.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_and_masked_sequences_have_no_groups(backend: str) -> None:
    mask = torch.tensor([False, False, True])
    groups = espo_groups(
        torch.tensor([torch.nan, 1.0, 2.0]),
        torch.tensor([0, 0, 2, 3, 3]),
        vocab_size=9,
        min_clip=0.1,
        loss_mask=mask,
        backend=backend,
    )
    assert groups.group_id.tolist() == [255, 255, 0]
    assert groups.count.tolist() == [[0, 0], [0, 0], [1, 0], [0, 0]]
    assert groups.clip[[0, 1, 3]].eq(0).all()
    assert groups.clip[2, 1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(ragged_lengths, seeds, fraction_lists, st.booleans())
def test_groups_partition_the_unmasked_tokens_by_entropy(
    backend: str, lengths: list[int], seed: int, fractions: tuple[float, ...], tied: bool
) -> None:
    batch = response_batch(lengths, seed, tied=tied)
    entropies = batch.entropies.float()
    groups = espo_groups(
        entropies, batch.cu_seqlens, vocab_size=9, fractions=fractions, loss_mask=batch.loss_mask, backend=backend
    )
    assert torch.equal(groups.group_id == 255, ~batch.loss_mask)
    offsets = batch.cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(offsets)):
        ids, e = groups.group_id[start:end], entropies[start:end]
        n = int(batch.loss_mask[start:end].sum())
        ranks = [math.ceil(n * sum(Fraction(str(q)) for q in fractions[: j + 1])) for j in range(len(fractions))]
        assert groups.count[i].tolist() == [b - a for a, b in zip([0, *ranks], [*ranks, n], strict=True)]
        for tau in range(len(fractions)):
            higher, lower = ids == tau, (ids > tau) & (ids != 255)
            if higher.any() and lower.any():
                edge = e[higher].min()
                assert edge >= e[lower].max()
                tied_lower = (lower & (e == edge)).nonzero()
                if tied_lower.numel():
                    assert (higher & (e == edge)).nonzero().max() < tied_lower.min()
