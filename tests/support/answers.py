"""Answers the requests of a step's prompt selection, without engines."""

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

# Score of a prompt's i-th rollout, None for no verdict
Scores = Callable[[Prompt, int], float | None]


def make_pool(n: int, tags: int = 2) -> list[Prompt]:
    """Return prompts p0, p1, ... with alternating tags."""
    return [
        Prompt(id=f"p{i}", token_ids=(i,), answer="1", task="t", difficulty=str(i % tags))
        for i in range(n)
    ]


def answer(request: RolloutRequest, scores: Scores, previous: Group | None = None) -> Group:
    """Return the requested rollouts, after the previous group's."""
    samples = range(request.first_sample, request.first_sample + request.samples)
    verdicts = [scores(request.prompt, sample) for sample in samples]
    new_group = group(*verdicts, name=f"g{request.index}")
    rollouts = tuple(
        msgspec.structs.replace(rollout, sample_index=sample, prompt_id=request.prompt.id)
        for sample, rollout in zip(samples, new_group.rollouts, strict=True)
    )
    previous_rollouts = () if previous is None else previous.rollouts
    return msgspec.structs.replace(
        new_group, prompt=request.prompt, rollouts=previous_rollouts + rollouts
    )


def play(
    selection: StepSelection, scores: Scores, *, order: int = 0
) -> tuple[list[list[RolloutRequest]], SelectionResult]:
    """Play one step. Returns the requests of each round, with extensions, and the result.

    It ends once the groups so far decide the step.
    order: seed of the order in which groups arrive.
    """
    rng = random.Random(order)
    groups: dict[int, Group] = {}
    rounds: list[list[RolloutRequest]] = []
    requests: Sequence[RolloutRequest] = selection.first_round()
    while requests:
        rounds.append(list(requests))
        waiting = list(requests)
        while waiting:
            request = waiting.pop(rng.randrange(len(waiting)))
            index = request.index
            groups[index] = answer(request, scores, groups.get(index))
            extension = selection.handle_group(index, groups[index])
            if extension is not None:
                waiting.append(extension)
                rounds[-1].append(extension)
            if selection.num_needed() is not None:
                return rounds, selection.result()
        requests = selection.next_round()
    return rounds, selection.result()


def play_steps(
    selector: Selector, steps: Sequence[int], scores: Scores, *, order: int = 0
) -> list[object]:
    """Play several steps. Returns each step's result and metrics."""
    results: list[object] = []
    for step in steps:
        selection = selector.select(step)
        _, result = play(selection, scores, order=order + step)
        results.append((result, selection.metrics()))
    return results
