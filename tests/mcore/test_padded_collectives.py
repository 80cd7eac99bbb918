"""Gathers and reduce-scatters of parts of different sizes over equal collectives."""

from typing import Any

import pytest
import torch

from megatron_rl.mcore.cpu.padded_collectives import padded_gather, padded_reduce_scatter

SIZES = [3, 0, 1]


class Member:
    """A group as one of its ranks sees it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def parts() -> list[torch.Tensor]:
    return list(torch.arange(8.0).view(4, 2).split(SIZES))


@pytest.mark.parametrize("rank", range(3))
def test_gather_joins_parts_in_order_without_padding(rank: int) -> None:
    def gather(part: torch.Tensor, group: Member) -> torch.Tensor:
        buffers = [torch.full((3, 2), -1.0) for _ in SIZES]
        for buffer, rank_part in zip(buffers, parts(), strict=True):
            buffer[: len(rank_part)] = rank_part
        buffers[group.rank()] = part
        assert len(part) == 3, "all ranks pass the same size"
        return torch.cat(buffers)

    member: Any = Member(rank)
    assert padded_gather(gather)(parts()[rank], member, SIZES, False).equal(torch.cat(parts()))


@pytest.mark.parametrize("rank", range(3))
def test_reduce_scatter_returns_the_sum_of_the_part_of_a_rank(rank: int) -> None:
    def reduce_scatter(whole: torch.Tensor, group: Member) -> torch.Tensor:
        return 10 * whole.chunk(3)[group.rank()]  # as ten ranks with equal values

    member: Any = Member(rank)
    part = padded_reduce_scatter(reduce_scatter)(torch.cat(parts()), member, SIZES, False)
    assert part.equal(10 * parts()[rank])


@pytest.mark.parametrize("sizes", [None, [2, 2]])
def test_equal_parts_use_the_original_collective(sizes: list[int] | None) -> None:
    def original(*arguments: Any) -> torch.Tensor:
        assert arguments[1:] == ("group", sizes, True)
        return torch.ones(1)

    group: Any = "group"
    for collective in (padded_gather(original), padded_reduce_scatter(original)):
        assert collective(torch.zeros(4), group, sizes, True).equal(torch.ones(1))
