"""Groups of judged rollouts with made-up contents."""

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason

NOWHERE = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


def verdict(correctness: float | None, reward: float | None = None) -> Verdict:
    if correctness is None:
        return Verdict(reward=None, correctness=None, reason="timeout")
    return Verdict(reward=correctness if reward is None else reward, correctness=correctness)


def group(*verdicts: Verdict | float | None, name: str = "g") -> Group:
    """A group with one rollout for each verdict; a number stands for a verdict of that reward and correctness."""
    rollouts = tuple(
        RolloutRef(
            rollout_id=f"{name}/{i}",
            prompt_id=name,
            sample_index=i,
            num_inputs=9,
            num_trainable=4,
            finish_reason=FinishReason.STOP,
            versions=(0,),
            verdict=v if isinstance(v, Verdict) else verdict(v),
            location=NOWHERE,
        )
        for i, v in enumerate(verdicts)
    )
    return Group(group_id=name, prompt=Prompt(id=name, token_ids=(1,), answer="1", task="t"), rollouts=rollouts)
