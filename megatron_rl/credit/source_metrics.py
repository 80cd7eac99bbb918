"""Metrics of each source of a mixture. Without a mixture there are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.credit.group_kinds import GroupKind, kind_of

_ZERO_VARIANCE = (GroupKind.ALL_CORRECT, GroupKind.ALL_INCORRECT, GroupKind.TIED_REWARD)


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics `source/NAME/...` of the groups of a step.

    reward, accuracy: means over rollouts with a verdict, missing without one. accuracy is the mean
    correctness. zero_variance_rate: share of the groups with at least two verdicts, 0 without such
    groups. prompt_share: share of the step's prompts. tokens: tokens that engines sampled.
    """
    metrics: dict[str, float] = {}
    for name, members in groups_by_source(groups).items():
        values = _values_of(members)
        values["prompt_share"] = len(members) / len(groups)
        metrics |= {f"source/{name}/{key}": value for key, value in values.items()}
    return metrics


def groups_by_source(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return the groups of each source of a mixture, by name in alphabetical order."""
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        if group.prompt.source:
            by_source.setdefault(group.prompt.source, []).append(group)
    return dict(sorted(by_source.items()))


def _values_of(groups: Sequence[Group]) -> dict[str, float]:
    verdicts = [rollout.verdict for group in groups for rollout in group.rollouts_with_verdict]
    rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    scores = [verdict.correctness for verdict in verdicts if verdict.correctness is not None]
    kinds = [kind for group in groups if (kind := kind_of(group)) != GroupKind.TOO_FEW_VERDICTS]
    num_zero_variance = sum(kind in _ZERO_VARIANCE for kind in kinds)
    values = {
        "prompts": float(len(groups)),
        "tokens": float(sum(sampled_tokens(group) for group in groups)),
        "zero_variance_rate": num_zero_variance / len(kinds) if kinds else 0.0,
    }
    if rewards:
        values["reward"] = sum(rewards) / len(rewards)
    if scores:
        values["accuracy"] = sum(scores) / len(scores)
    return values
