"""Which share of the generated tokens ended in a gradient, worked out by hand."""

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.credit.account import token_usage
from support.groups import group

COUNTS = Denominators(sequences=1, tokens=1)


def plan() -> StepPlan:
    """Three rollouts of four trainable tokens; two optimizer steps on two ranks, a filler among their micro-batches."""
    rollouts: tuple[RolloutRef, ...] = group(1.0, 0.0, 1.0).rollouts
    first = OptimizerStep(micro_batches=(((0,), (1,)), ((), ())), denominators=COUNTS)
    second = OptimizerStep(micro_batches=(((),), ((2,),)), denominators=COUNTS)
    return StepPlan(step=0, rollouts=rollouts, advantages=(1.0, -1.0, 1.0), optimizer_steps=(first, second))


def test_tokens_of_all_applied_steps_and_ranks_are_used() -> None:
    assert token_usage(16, plan(), applied=2) == {
        "rollout/wasted_token_fraction": 0.25,
        "train/samples": 3.0,
        "train/optimizer_steps": 2.0,
        "train/micro_batches": 3.0,
    }


def test_tokens_of_a_step_that_was_not_applied_are_wasted() -> None:
    assert token_usage(16, plan(), applied=1)["rollout/wasted_token_fraction"] == 0.5
    assert token_usage(16, plan(), applied=0)["rollout/wasted_token_fraction"] == 1.0


def test_nothing_generated_is_nothing_wasted() -> None:
    assert token_usage(0, plan(), applied=2)["rollout/wasted_token_fraction"] == 0.0
