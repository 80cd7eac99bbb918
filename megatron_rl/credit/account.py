"""Token account of a step: every token that engines sampled belongs to exactly one class.

The classes are

- trained/mixed, trained/tied, trained/zero_variance: in gradients that were applied.
- not_applied: planned, but a NaN, an Inf or a spike of the gradients occurred before.
- zero_variance_dropped, tied_dropped, tied_reward, too_few_verdicts: in groups without a learning
  signal, or in more of them than may train beside the mixed groups.
- zero_advantage: with advantage 0 in a mixed group.
- truncated_masked: excluded from the loss.
- no_verdict: in rollouts without a verdict.
- probe_stopped, surplus_cut: in groups that the selection stopped after a probe or did not need.
  Stopped probes that train are in the classes of trained tokens.
- surplus_aborted: in responses that were aborted, because the step had enough mixed groups.
- rejected/REASON, stale: in rollouts that could not be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from megatron_rl.contracts.group import STALE, Group, RolloutRef
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.assign import BatchCredit
from megatron_rl.credit.group_kinds import GroupKind, ScoredRollouts

_CLASS_BY_KIND = {
    GroupKind.MIXED: "mixed",
    GroupKind.TIED_CORRECT: "tied",
    GroupKind.TIED_INCORRECT: "tied",
    GroupKind.ALL_CORRECT: "zero_variance",
    GroupKind.ALL_INCORRECT: "zero_variance",
}
# Classes of rollouts that could have trained and are not in the plan
_CLASS_IF_UNPLANNED = {
    "mixed": "zero_advantage",
    "tied": "tied_dropped",
    "zero_variance": "zero_variance_dropped",
}
# Classes that are reported even if they are empty
_ALWAYS_REPORTED = (
    "trained/mixed",
    "trained/tied",
    "trained/zero_variance",
    "zero_variance_dropped",
)


def account(
    groups: Sequence[Group],
    credit: BatchCredit,
    plan: StepPlan,
    num_applied: int,
    *,
    generated_tokens: int,
    stopped_groups: Sequence[Group] = (),
    surplus_groups: Sequence[Group] = (),
    unused_tokens: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, float]:
    """Count the tokens of one step by class, as metrics under `account/`.

    groups: the groups that `credit` belongs to, in the same order.
    num_applied: number of the plan's optimizer steps that were applied, from the first on.
    generated_tokens: number of tokens that engines sampled during the step.
    stopped_groups: groups that were not extended after a probe.
    surplus_groups: mixed groups that the step did not need.
    unused_tokens: by class, tokens of further groups that the step did not need.

    An empty class is omitted, except `trained/...` and `zero_variance_dropped`. `generated` is the
    number of all tokens. The caller adds the tokens of evaluations to it and to a class of their
    own. `unaccounted` is the number of tokens in no class. It is 0 unless a count is wrong
    (tests/credit/test_account.py::test_classes_sum_to_generated_tokens). The caller adds the tokens
    that only engines have counted.
    """
    tokens_by_class = Counter[str](dict.fromkeys(_ALWAYS_REPORTED, 0))
    tokens_by_class.update(unused_tokens)
    is_applied = _is_applied_by_rollout(plan, num_applied)
    for group, kind in zip(groups, credit.kinds, strict=True):
        for name, tokens in _classify_tokens(group, kind, is_applied):
            tokens_by_class[name] += tokens
    for name, unused_groups in (("probe_stopped", stopped_groups), ("surplus_cut", surplus_groups)):
        for group in unused_groups:
            for class_name, tokens in _classify_unused_tokens(group, name, is_applied):
                tokens_by_class[class_name] += tokens
    values = {
        f"account/{name}": float(count)
        for name, count in tokens_by_class.items()
        if count or name in _ALWAYS_REPORTED
    }
    return values | {
        "account/generated": float(generated_tokens),
        "account/unaccounted": float(generated_tokens - tokens_by_class.total()),
    }


def account_of_recording(
    groups: Sequence[Group],
    *,
    generated_tokens: int,
    unused_tokens: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, float]:
    """Count the tokens of rollouts that are recorded and not trained, as metrics under `account/`.

    groups: all groups of the batch. generated_tokens, unused_tokens: as in `account`.
    """
    tokens_by_class = Counter[str](recorded=0)
    tokens_by_class.update(unused_tokens)
    for group in groups:
        tokens_by_class.update(_rejected_tokens_by_class(group))
        tokens_by_class["recorded"] += sum(rollout.num_generated for rollout in group.rollouts)
    values = {f"account/{name}": float(count) for name, count in tokens_by_class.items()}
    return values | {
        "account/generated": float(generated_tokens),
        "account/unaccounted": float(generated_tokens - tokens_by_class.total()),
    }


def demonstrations(plan: StepPlan, num_applied: int) -> dict[str, float]:
    """Count the trained tokens that no engine sampled. Empty for a plan without such tokens.

    They are in addition to the classes of generated tokens. num_applied: as in `account`.
    """
    counts = [max(0, ref.num_trainable - ref.num_generated) for ref in plan.rollouts]
    if not any(counts):
        return {}
    applied_tokens = sum(counts[index] for index in _applied_indices(plan, num_applied))
    return {"account/demonstrated": float(applied_tokens)}


def usage(plan: StepPlan, num_applied: int, *, generated_tokens: int) -> dict[str, float]:
    """Compute metrics of how many generated tokens a plan trains on.

    num_applied: number of the plan's optimizer steps that were applied, from the first on.

    rollout/wasted_token_fraction is the share of the generated tokens that are in no applied
    gradient. train/zero_variance_samples counts rollouts of all-correct and all-incorrect groups.
    """
    trained_tokens = sum(
        plan.rollouts[i].num_trainable for i in _applied_indices(plan, num_applied)
    )
    wasted_fraction = 1.0 - trained_tokens / generated_tokens if generated_tokens else 0.0
    num_zero_variance = sum(alpha != 0.0 for alpha in plan.entropy_advantages)
    num_micro_batches = sum(len(step.micro_batches[0]) for step in plan.optimizer_steps)
    return {
        "rollout/wasted_token_fraction": wasted_fraction,
        "train/samples": float(len(plan.rollouts)),
        "train/zero_variance_samples": float(num_zero_variance),
        "train/optimizer_steps": float(num_applied),
        "train/micro_batches": float(num_micro_batches),
    }


def _applied_indices(plan: StepPlan, num_applied: int) -> Iterator[int]:
    """Yield the indices of the rollouts in the applied optimizer steps."""
    for step in plan.optimizer_steps[:num_applied]:
        for micro_batches in step.micro_batches:
            for micro_batch in micro_batches:
                yield from micro_batch


def _is_applied_by_rollout(plan: StepPlan, num_applied: int) -> dict[str, bool]:
    """Map the id of each planned rollout to True if its optimizer step was applied."""
    indices = set(_applied_indices(plan, num_applied))
    return {ref.rollout_id: index in indices for index, ref in enumerate(plan.rollouts)}


def _classify_tokens(
    group: Group, kind: GroupKind, is_applied: Mapping[str, bool]
) -> Iterator[tuple[str, int]]:
    """Yield (class, number of tokens) pairs that cover every token of a credited group once."""
    yield from _rejected_tokens_by_class(group).items()
    scored_ids = {rollout.rollout_id for rollout in ScoredRollouts.from_group(group).rollouts}
    for rollout in group.rollouts:
        trainable = min(rollout.num_trainable, rollout.num_generated)
        if rollout.rollout_id in scored_ids or rollout.rollout_id in is_applied:
            yield "truncated_masked", rollout.num_generated - trainable
            yield _class_of(rollout, kind, is_applied), trainable
        else:
            yield "no_verdict", rollout.num_generated


def _classify_unused_tokens(
    group: Group, name: str, is_applied: Mapping[str, bool]
) -> Iterator[tuple[str, int]]:
    """Yield (class, number of tokens) pairs of a group that was stopped or not needed.

    name: the class of tokens that do not train. Only stopped zero-variance groups train.
    """
    yield from _rejected_tokens_by_class(group).items()
    for rollout in group.rollouts:
        if rollout.rollout_id in is_applied:
            trainable = min(rollout.num_trainable, rollout.num_generated)
            yield "truncated_masked", rollout.num_generated - trainable
            yield _class_of(rollout, GroupKind.ALL_CORRECT, is_applied), trainable
        else:
            yield name, rollout.num_generated


def _class_of(rollout: RolloutRef, kind: GroupKind, is_applied: Mapping[str, bool]) -> str:
    """Return the class of a scored or planned rollout's trainable tokens."""
    name = _CLASS_BY_KIND.get(kind, str(kind))
    if rollout.rollout_id not in is_applied:
        return _CLASS_IF_UNPLANNED.get(name, name)
    return f"trained/{name}" if is_applied[rollout.rollout_id] else "not_applied"


def _rejected_tokens_by_class(group: Group) -> Counter[str]:
    return Counter(
        {
            reason if reason == STALE else f"rejected/{reason}": tokens
            for reason, tokens in group.rejected_tokens.items()
            if tokens
        }
    )
