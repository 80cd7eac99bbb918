"""What became of the tokens that engines drew: each is in exactly one class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.contracts.group import STALE, Group, RolloutRef
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.assign import BatchCredit
from megatron_rl.credit.group_kinds import Kind, ScoredRollouts

_SHORT = {
    Kind.MIXED: "mixed",
    Kind.TIED_CORRECT: "tied",
    Kind.TIED_INCORRECT: "tied",
    Kind.ALL_CORRECT: "flat",
    Kind.ALL_INCORRECT: "flat",
}
# What a rollout is that could have trained and is not in the plan
_LEFT = {"mixed": "at_the_mean", "tied": "tied_dropped", "flat": "zero_variance_dropped"}
_ALWAYS = ("trained/mixed", "trained/tied", "trained/flat", "zero_variance_dropped")


def account(
    groups: Sequence[Group],
    credited: BatchCredit,
    plan: StepPlan,
    applied: int,
    *,
    generated_tokens: int,
    stopped: Sequence[Group] = (),
    surplus: Sequence[Group] = (),
    carried: int = 0,
) -> dict[str, float]:
    """Tokens by class under `account/`, of one step whose first `applied` optimizer steps were
    made.

    generated_tokens: drawn by engines during the step. groups: what was credited, in its order.
    stopped, surplus: drawn and not used. carried: tokens of groups that were drawn for the next
    step, less those drawn for this one before it.

    trained/KIND: in gradients that were applied. not_applied: planned, and a NaN or Inf came
    before. zero_variance_dropped, tied_dropped, tied_reward, too_few_verdicts: of groups that had
    nothing to teach, or more than may train beside the mixed ones. at_the_mean: advantage 0 in a
    mixed group. truncated_masked: tokens that may not be trained. no_verdict. probe_stopped,
    surplus_cut: of such groups. carried: below 0 where more came from the step before.
    rejected/REASON, stale: rollouts that could not be used. A class without a token is left out,
    but for those that train and zero_variance_dropped. generated: all of them; with evaluation,
    which the caller adds to both, the classes add up to it. unaccounted: those in no class, 0
    unless a count is wrong
    (tests/credit/test_account.py::test_the_classes_add_up_to_what_was_generated).
    """
    found = Counter[str](dict.fromkeys(_ALWAYS, 0))
    fates = _outcome_by_rollout(plan, applied)
    for group, kind in zip(groups, credited.each, strict=True):
        for name, tokens in _of_group(group, kind, fates):
            found[name] += tokens
    for name, others in (("probe_stopped", stopped), ("surplus_cut", surplus)):
        for group in others:
            found.update(_rejected(group))
            found[name] += sum(rollout.num_generated for rollout in group.rollouts)
    found["carried"] += carried
    kept = {name: count for name, count in found.items() if count or name in _ALWAYS}
    values = {f"account/{name}": float(count) for name, count in kept.items()}
    return values | {
        "account/generated": float(generated_tokens),
        "account/unaccounted": float(generated_tokens - found.total()),
    }


def warning_of(values: Mapping[str, float]) -> str | None:
    """What to say where classes and generated tokens part; None where they do not."""
    missing = values["account/unaccounted"]
    if not missing:
        return None
    return (
        f"warning: {abs(missing):.0f} of {values['account/generated']:.0f} generated tokens are "
        f"{'in no class' if missing > 0 else 'counted twice'} (account/unaccounted): the account of this step is "
        "wrong; what is trained is not affected"
    )


def usage(plan: StepPlan, applied: int, *, generated_tokens: int) -> dict[str, float]:
    """How much of what was generated is in the first `applied` optimizer steps of a plan, and how
    much is planned.

    rollout/wasted_token_fraction: the share of generated tokens that ended in no gradient.
    train/zero_variance_samples: of groups that are all right or all wrong.
    """
    trained = sum(plan.rollouts[i].num_trainable for i in _applied(plan, applied))
    return {
        "rollout/wasted_token_fraction": 1.0 - trained / generated_tokens
        if generated_tokens
        else 0.0,
        "train/samples": float(len(plan.rollouts)),
        "train/zero_variance_samples": float(
            sum(alpha != 0.0 for alpha in plan.entropy_advantages)
        ),
        "train/optimizer_steps": float(applied),
        "train/micro_batches": float(
            sum(len(step.micro_batches[0]) for step in plan.optimizer_steps)
        ),
    }


def _applied(plan: StepPlan, applied: int) -> Iterator[int]:
    """Indices of the rollouts in the optimizer steps that were made."""
    return (
        i
        for step in plan.optimizer_steps[:applied]
        for rank in step.micro_batches
        for m in rank
        for i in m
    )


def _outcome_by_rollout(plan: StepPlan, applied: int) -> dict[str, bool]:
    """Whether the optimizer step of a planned rollout was made, by rollout id."""
    made = set(_applied(plan, applied))
    return {ref.rollout_id: index in made for index, ref in enumerate(plan.rollouts)}


def _of_group(group: Group, kind: Kind, fates: Mapping[str, bool]) -> Iterator[tuple[str, int]]:
    """Every token of a credited group with its class, in lumps."""
    yield from _rejected(group).items()
    told = {rollout.rollout_id for rollout in ScoredRollouts.of(group).rollouts}
    for rollout in group.rollouts:
        trainable = min(rollout.num_trainable, rollout.num_generated)
        if rollout.rollout_id in told or rollout.rollout_id in fates:
            yield "truncated_masked", rollout.num_generated - trainable
            yield _class_of(rollout, kind, fates), trainable
        else:
            yield "no_verdict", rollout.num_generated


def _class_of(rollout: RolloutRef, kind: Kind, fates: Mapping[str, bool]) -> str:
    short = _SHORT.get(kind, str(kind))
    made = fates.get(rollout.rollout_id)
    if made is None:
        return _LEFT.get(short, short)
    return f"trained/{short}" if made else "not_applied"


def _rejected(group: Group) -> Counter[str]:
    return Counter(
        {
            r if r == STALE else f"rejected/{r}": tokens
            for r, tokens in group.rejected_tokens.items()
            if tokens
        }
    )
