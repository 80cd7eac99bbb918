"""Answers what a step's selection asks, without engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.selection.selector import (
    RolloutRequest,
    SelectionResult,
    Selector,
    StepSelection,
)
from tests.support.groups import group

Scores = Callable[[Prompt, int], float | None]


def make_pool(n: int, tags: int = 2) -> list[Prompt]:
    """Prompts p0, p1, ... with tags in turn."""
    return [
        Prompt(id=f"p{i}", token_ids=(i,), answer="1", task="t", difficulty=str(i % tags))
        for i in range(n)
    ]


def answer(ask: RolloutRequest, scores: Scores, before: Group | None = None) -> Group:
    """The asked rollouts behind those that the group has; scores: of a prompt's i-th rollout, None:
    no verdict.
    """
    samples = range(ask.first_sample, ask.first_sample + ask.samples)
    drawn = group(*(scores(ask.prompt, sample) for sample in samples), name=f"g{ask.index}")
    rollouts = tuple(
        msgspec.structs.replace(r, sample_index=i, prompt_id=ask.prompt.id)
        for i, r in zip(samples, drawn.rollouts, strict=True)
    )
    earlier = () if before is None else before.rollouts
    return msgspec.structs.replace(drawn, prompt=ask.prompt, rollouts=earlier + rollouts)


def play(
    selection: StepSelection, scores: Scores, *, order: int = 0
) -> tuple[list[list[RolloutRequest]], SelectionResult]:
    """One step to its end: what was asked, round by round with extensions, and what was chosen.

    order: seed of the order in which groups arrive.
    """
    rng, groups, rounds = random.Random(order), dict[int, Group](), list[list[RolloutRequest]]()
    asks: Sequence[RolloutRequest] = selection.begin()
    while asks:
        rounds.append(list(asks))
        waiting = list(asks)
        while waiting:
            ask = waiting.pop(rng.randrange(len(waiting)))
            groups[ask.index] = answer(ask, scores, groups.get(ask.index))
            if (extension := selection.answered(ask.index, groups[ask.index])) is not None:
                waiting.append(extension)
                rounds[-1].append(extension)
        asks = selection.more()
    return rounds, selection.result()


def play_steps(
    selector: Selector, steps: Sequence[int], scores: Scores, *, order: int = 0
) -> list[object]:
    """What each step chose, with its metrics."""
    told: list[object] = []
    for step in steps:
        selection = selector.select(step)
        told.append((play(selection, scores, order=order + step)[1], selection.metrics()))
    return told
