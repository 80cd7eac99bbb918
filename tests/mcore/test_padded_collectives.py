"""Gloo's equal gathers and reduce-scatters, made to serve parts of different sizes."""

from typing import Any

import pytest
import torch

from megatron_rl.mcore.cpu.padded_collectives import padded_gather, padded_reduce_scatter

SIZES = [3, 0, 1]


class Member:
    """One rank of a group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def parts() -> list[torch.Tensor]:
    return list(torch.arange(8.0).view(4, 2).split(SIZES))


@pytest.mark.parametrize("rank", range(3))
def test_parts_are_gathered_in_order_without_their_padding(rank: int) -> None:
    def gather(part: torch.Tensor, group: Member) -> torch.Tensor:
        everyone = [torch.full((3, 2), -1.0) for _ in SIZES]
        for padded, own in zip(everyone, parts(), strict=True):
            padded[: len(own)] = own
        everyone[group.rank()] = part
        assert len(part) == 3, "all ranks pass the same size"
        return torch.cat(everyone)

    member: Any = Member(rank)
    assert padded_gather(gather)(parts()[rank], member, SIZES, False).equal(torch.cat(parts()))


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_gets_the_sum_of_its_part(rank: int) -> None:
    def reduce_scatter(whole: torch.Tensor, group: Member) -> torch.Tensor:
        return 10 * whole.chunk(3)[group.rank()]  # ten ranks with the same numbers

    member: Any = Member(rank)
    scattered = padded_reduce_scatter(reduce_scatter)(torch.cat(parts()), member, SIZES, False)
    assert scattered.equal(10 * parts()[rank])


@pytest.mark.parametrize("sizes", [None, [2, 2]])
def test_equal_parts_are_left_to_megatron(sizes: list[int] | None) -> None:
    def megatrons(*arguments: Any) -> torch.Tensor:
        assert arguments[1:] == ("group", sizes, True)
        return torch.ones(1)

    group: Any = "group"
    for wrapped in (padded_gather(megatrons), padded_reduce_scatter(megatrons)):
        assert wrapped(torch.zeros(4), group, sizes, True).equal(torch.ones(1))
