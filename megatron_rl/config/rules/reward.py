"""Rules of the scorers of responses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration, PartSettings, RewardSettings
from megatron_rl.contracts.plugins import PYTHONPATH_REMEDY, missing_module

# Its name is a part of metric names.
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_EXAMPLE = (
    "reward.parts={sums: {name: exact_match, tasks: [sums]}, style: {name: my_reward:Style, "
    "weight: 0.1}}"
)


def check_reward(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about the scorer, or about each of several scorers."""
    reward = c.reward
    if reward.name != "parts":
        yield from _check_scorer(reward, "reward")
        if reward.parts:
            rule = f"Only reward.name=parts reads this key, and reward.name={reward.name}"
            yield BrokenRule("reward.parts", rule, "Remove it, or choose reward=parts")
        return
    if reward.options or reward.answer != RewardSettings.answer:
        key = "reward.options" if reward.options else "reward.answer"
        rule = "With reward.name=parts, each part has its own"
        yield BrokenRule(key, rule, f"Write it to a part: {_EXAMPLE}")
    if not reward.parts:
        rule = "reward.name=parts needs its scorers by name"
        yield BrokenRule("reward.parts", rule, f"Give them: {_EXAMPLE}")
    for name, part in reward.parts.items():
        if not _PART_NAME.fullmatch(name):
            rule = f"{name!r}: a name of a part has only letters, digits, '_' and '-'"
            yield BrokenRule("reward.parts", rule, "Rename the part")
            continue
        yield from _check_scorer(part, f"reward.parts.{name}")
        yield from _check_weight(part, f"reward.parts.{name}")
    yield from _check_weights_of_tasks(reward)


def _check_scorer(scorer: RewardSettings | PartSettings, section: str) -> Iterator[BrokenRule]:
    """Yield broken rules about one scorer. section: of its keys."""
    is_exact_match = scorer.name == "exact_match"
    if ":" in scorer.name and (problem := missing_module(scorer.name)):
        yield BrokenRule(f"{section}.name", problem, PYTHONPATH_REMEDY)
    if is_exact_match and scorer.options:
        rule = f"{section}.name={scorer.name} reads no options"
        remedy = "Remove them. Verifiers and user-defined classes get them"
        yield BrokenRule(f"{section}.options", rule, remedy)
    if not is_exact_match and scorer.answer != RewardSettings.answer:
        rule = f"Only exact_match reads this key, and {section}.name={scorer.name}"
        yield BrokenRule(f"{section}.answer", rule, "Remove it")
    if scorer.name in ("exact_match", "remote") and scorer.processes not in (None, 1):
        rule = f"{section}.name={scorer.name} runs in the collector, without a process of its own"
        remedy = "Remove it, or use a verifier or a user-defined scorer"
        yield BrokenRule(f"{section}.processes", rule, remedy)


def _check_weight(part: PartSettings, section: str) -> Iterator[BrokenRule]:
    if part.gate and part.weight:
        rule = "A gate has no weight: its rewards would count for responses that pass it, too"
        remedy = "Remove it, or write the scorer to a second part"
        yield BrokenRule(f"{section}.weight", rule, remedy)


def _check_weights_of_tasks(reward: RewardSettings) -> Iterator[BrokenRule]:
    """Yield a broken rule for each task, and for all others, whose weights add up to 0."""
    tasks = {task for part in reward.parts.values() for task in part.tasks}
    for task in (*sorted(tasks), None):
        parts = [part for part in reward.parts.values() if not part.tasks or task in part.tasks]
        if parts and not any(part.share for part in parts):
            prompts = "prompts of other tasks" if task is None else f"prompts of the task {task}"
            rule = f"The weights of the parts that score {prompts} add up to 0"
            yield BrokenRule("reward.parts", rule, "Give one of them a weight, or limit its tasks")
