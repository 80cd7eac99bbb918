"""Scores a response by several scorers, the parts of a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_rl.config.schema import PartSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import hide_values
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.runner import ScorerCalls, make_verdict
from megatron_rl.rewards.user_calls import Ending, Outcome


@dataclass(frozen=True)
class Part:
    """One scorer of several: its name, its settings, and its calls."""

    name: str
    settings: PartSettings
    calls: ScorerCalls


class ScorerOfParts:
    """Calls the parts that score a prompt's task, all at the same time.

    With weights w, rewards r and correctnesses c of the parts:

        reward = sum(w r) / sum(w)        correctness = sum(w c) / sum(w)

    The correctness is None if a part with a weight gives none. Advantages then follow the reward.
    If a gate gives 0, both are 0. The penalty is the largest of the parts with a weight, and the
    answer is that of the first part which finds one.

    A response has no reward if a part with a weight, or a gate, gives it none.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    async def score(
        self, prompt: Prompt, text: str, finish_reason: FinishReason, *, subject: str
    ) -> Outcome[Verdict]:
        """Score one response. Cancelling this cancels all parts."""
        parts = [part for part in self._parts if part.settings.scores(prompt.task)]
        calls = (
            part.calls.score(prompt, text, finish_reason, subject=f"{subject}, part {part.name}")
            for part in parts
        )
        outcomes = await asyncio.gather(*calls)
        verdicts = {
            part.name: _verdict_of(part, outcome)
            for part, outcome in zip(parts, outcomes, strict=True)
        }
        return Outcome(Ending.RETURNED, value=combine(parts, verdicts))


def _verdict_of(part: Part, outcome: Outcome[Verdict]) -> Verdict:
    return make_verdict(outcome, partial(hide_values, options=part.settings.options))


def combine(parts: Sequence[Part], verdicts: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict of a response from those of its parts.

    `Verdict.parts` has the rewards of all parts that give one. The parts of a part follow its name
    and a dot.
    """
    rewards = _rewards_by_name(verdicts)
    problem = _problem(parts, verdicts)
    if problem:
        return Verdict(reward=None, correctness=None, reason=problem, parts=rewards)
    shares = {part.name: part.settings.share for part in parts if part.settings.share > 0}
    answers = (verdict.answer for verdict in verdicts.values() if verdict.answer is not None)
    reward = _mean(shares, {name: verdicts[name].reward for name in shares})
    correctness = _mean(shares, {name: verdicts[name].correctness for name in shares})
    if any(rewards[part.name] == 0 for part in parts if part.settings.gate):
        reward = correctness = 0.0
    return Verdict(
        reward=reward,
        correctness=correctness,
        penalty=max(verdicts[name].penalty for name in shares),
        answer=next(answers, None),
        parts=rewards,
    )


def _rewards_by_name(verdicts: Mapping[str, Verdict]) -> dict[str, float]:
    rewards: dict[str, float] = {}
    for name, verdict in verdicts.items():
        if verdict.reward is not None:
            rewards[name] = verdict.reward
            rewards |= {f"{name}.{inner}": reward for inner, reward in verdict.parts.items()}
    return rewards


def _problem(parts: Sequence[Part], verdicts: Mapping[str, Verdict]) -> str:
    """Return why a response has no reward, or ""."""
    trainers = [part for part in parts if part.settings.share > 0]
    gates = [part for part in parts if part.settings.gate]
    if not trainers:
        return "reward.parts: no part with a weight scores the task of the prompt"
    for part in (*trainers, *gates):
        verdict = verdicts[part.name]
        if verdict.reward is None:
            return f"{verdict.reason} (part {part.name})"
    for part in trainers if gates else ():
        # A reward may be below 0, so that the 0 of a gate would raise it
        if verdicts[part.name].correctness is None:
            return f"beside a gate, part {part.name} has to give a correctness, from 0 to 1"
    return ""


def _mean(shares: Mapping[str, float], values: Mapping[str, float | None]) -> float | None:
    """Return the weighted mean of values, None if one is missing."""
    total = 0.0
    for name, share in shares.items():
        value = values[name]
        if value is None:
            return None
        total += share * value
    return total / sum(shares.values())
