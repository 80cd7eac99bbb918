"""Exact group sizes, ties, clip widths."""

import math
from fractions import Fraction
from itertools import accumulate, pairwise

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
    groups = espo_groups(
        *one_sequence([1.0] * n), vocab_size=9, fractions=(fraction,), backend=backend
    )
    assert groups.count.tolist() == [[k, n - k]]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 0.24), min_size=3, max_size=4), st.integers(1, 2000))
def test_arbitrary_fractions_cut_at_their_sums(
    backend: str, fractions: list[float], n: int
) -> None:
    """Sums of unrelated fractions have long denominators, whose products exceed 64 bits."""
    groups = espo_groups(
        *one_sequence([1.0] * n), vocab_size=9, fractions=fractions, backend=backend
    )
    reference = espo_groups(
        *one_sequence([1.0] * n), vocab_size=9, fractions=fractions, backend="reference"
    )
    assert torch.equal(groups.group_id, reference.group_id)
    tolerance = Fraction(5, 1_000_000)  # the nearest short fraction is that close
    ends = groups.count[0].cumsum(0).tolist()
    for total, end in zip(accumulate(map(Fraction, fractions)), ends[:-1], strict=True):
        assert math.ceil(n * (total - tolerance)) <= end <= math.ceil(n * (total + tolerance))
    assert ends[-1] == n


def test_fractions_that_sum_to_one_leave_no_rest_group() -> None:
    """Normalised shares rarely add up to just 1 in binary."""
    shares = [math.exp(-x) for x in (0.3, 1.1, 2.7)]
    fractions = [share / sum(shares) for share in shares]
    groups = espo_groups(*one_sequence([1.0] * 100), vocab_size=9, fractions=fractions)
    assert groups.count[0, 3] == 0
    assert groups.count.sum() == 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_earlier_position(backend: str) -> None:
    groups = espo_groups(
        *one_sequence([0.5, 2.0, 0.5, 2.0, 2.0]), vocab_size=9, fractions=(0.4,), backend=backend
    )
    assert groups.group_id.tolist() == [1, 0, 1, 0, 1]
    zeros = espo_groups(
        *one_sequence([-0.0, 0.0, -0.0, 0.0]), vocab_size=9, fractions=(0.5,), backend=backend
    )
    assert zeros.group_id.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip_width_follows_the_entropy(backend: str) -> None:
    entropies, cu_seqlens = one_sequence([3.0, 1.0, 0.0, 0.0, 0.0])
    options = {"vocab_size": 100, "alpha": 0.02, "backend": backend}
    adaptive = espo_groups(entropies, cu_seqlens, **options)
    reference = [[0.02 * 3.0 / math.log(100), 0.02 * 0.25 / math.log(100)]]
    torch.testing.assert_close(adaptive.clip, torch.tensor(reference))
    with_floor = espo_groups(entropies, cu_seqlens, min_clip=0.01, **options)
    torch.testing.assert_close(with_floor.clip, torch.tensor([[reference[0][0], 0.01]]))
    with_fixed_clip = espo_groups(entropies, cu_seqlens, fixed_clip=0.2, **options)
    torch.testing.assert_close(with_fixed_clip.clip, torch.full((1, 2), 0.2))
    one_group = espo_groups(entropies, cu_seqlens, fractions=(), **options)
    torch.testing.assert_close(one_group.clip, torch.tensor([[0.02 * 0.8 / math.log(100)]]))
    assert not one_group.group_id.any()


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
    backend: str,
    lengths: list[int],
    seed: int,
    fractions: tuple[float, ...],
    coarse_entropies: bool,
) -> None:
    batch = response_batch(lengths, seed, coarse_entropies=coarse_entropies)
    entropies = batch.entropies.float()
    groups = espo_groups(
        entropies,
        batch.cu_seqlens,
        vocab_size=9,
        fractions=fractions,
        loss_mask=batch.loss_mask,
        backend=backend,
    )
    assert torch.equal(groups.group_id == 255, ~batch.loss_mask)
    for i, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        n = int(batch.loss_mask[start:end].sum())
        shares = [Fraction(q).limit_denominator(1_000_000) for q in fractions]
        ranks = [math.ceil(n * total) for total in accumulate(shares)]
        assert groups.count[i].tolist() == [b - a for a, b in pairwise([0, *ranks, n])]
        for tau in range(len(fractions)):
            assert_ordered(groups.group_id[start:end], entropies[start:end], tau)


def assert_ordered(ids: torch.Tensor, e: torch.Tensor, tau: int) -> None:
    """Group `tau` has higher entropies than the later groups, and the earlier ties."""
    higher = ids == tau
    lower = (ids > tau) & (ids != 255)
    if not (higher.any() and lower.any()):
        return
    edge = e[higher].min()
    assert edge >= e[lower].max()
    lower_ties = (lower & (e == edge)).nonzero()
    if lower_ties.numel():
        assert (higher & (e == edge)).nonzero().max() < lower_ties.min()
