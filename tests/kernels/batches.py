"""Ragged batches for the tests of the objective, sampled by hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from espo_kernels import EspoGroups


@dataclass(frozen=True)
class ResponseBatch:
    """T packed tokens of B sequences; see `espo_policy_loss`."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    entropies: torch.Tensor
    cu_seqlens: torch.Tensor
    loss_mask: torch.Tensor


def response_batch(
    lengths: list[int],
    seed: int,
    *,
    drift: float = 0.1,
    coarse_entropies: bool = False,
    mask_share: float = 0.2,
    one_advantage: bool = False,
) -> ResponseBatch:
    """Make a float64 batch.

    drift: spread of the log ratios. coarse_entropies: put entropies on a coarse grid, so that they
    tie. mask_share: share of masked tokens. With odd seeds, every token has its own advantage, some
    of them 0, unless one_advantage.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal() -> torch.Tensor:
        return torch.randn(tokens, generator=rng, dtype=torch.float64)

    old = -normal().abs()
    entropies = normal().abs() ** 2  # many near zero, a few large
    if coarse_entropies:
        entropies = (entropies * 2).round() / 2
    sequence_level = torch.randn(len(lengths), generator=rng, dtype=torch.float64)
    advantages = sequence_level.repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    if seed % 2 and not one_advantage:
        token_rng = torch.Generator().manual_seed(seed)
        advantages = torch.randn(tokens, generator=token_rng, dtype=torch.float64).round(decimals=1)
    return ResponseBatch(
        logprobs=old + drift * normal(),
        old_logprobs=old,
        advantages=advantages,
        entropies=entropies,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=torch.rand(tokens, generator=rng) >= mask_share,
    )


class Group(NamedTuple):
    """Entropy group `tau` of a response: its tokens in the batch, their ratios and its clip width,
    in float64.
    """

    response: int
    tau: int
    tokens: torch.Tensor
    ratios: torch.Tensor
    clip: torch.Tensor

    @property
    def distance(self) -> torch.Tensor:
        """Distance of each ratio to the nearer of 1 - ε and 1 + ε, where the loss has a kink."""
        return ((self.ratios - 1).abs() - self.clip).abs()


def each_group(batch: ResponseBatch, groups: EspoGroups, denominator: str) -> Iterator[Group]:
    """The ratios by their definition."""
    offsets = batch.cu_seqlens.tolist()
    for i, row in enumerate(groups.count):
        span = slice(offsets[i], offsets[i + 1])
        for tau in range(len(row)):
            t = offsets[i] + (groups.group_id[span] == tau).nonzero().flatten().cpu()
            delta = (batch.logprobs - batch.old_logprobs)[t]
            s = (delta.mean() + (delta if denominator == "old" else 0 * delta)).exp()
            yield Group(i, tau, t, s, groups.clip[i, tau].double().cpu())


def is_close_to_a_bound(batch: ResponseBatch, groups: EspoGroups, denominator: str) -> bool:
    """True if rounding decides which tokens are clipped."""
    return any(
        bool((group.distance < 1e-5).any()) for group in each_group(batch, groups, denominator)
    )


ragged_lengths = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(2, 40)), min_size=1, max_size=6
)
seeds = st.integers(0, 2**31 - 1)
fraction_lists = st.sampled_from(
    [(), (0.2,), (0.07,), (0.5, 0.25), (0.2, 0.3, 0.1), (1 / 3, 1 / 7, 0.1234567891)]
)
