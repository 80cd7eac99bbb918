"""Groups of scored rollouts with artificial contents."""

from collections.abc import Sequence

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason

NOWHERE = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


def verdict(
    correctness: float | None, reward: float | None = None, penalty: float = 0.0
) -> Verdict:
    """Return a verdict. correctness None: scoring failed. reward None: equal to the correctness."""
    if correctness is None:
        return Verdict(reward=None, correctness=None, reason="timeout")
    return Verdict(
        reward=correctness if reward is None else reward, correctness=correctness, penalty=penalty
    )


def group(
    *verdicts: Verdict | float | None,
    name: str = "g",
    num_generated: Sequence[int] | None = None,
    repetition: Sequence[float] | None = None,
    weight: float = 1.0,
) -> Group:
    """Return a group with one rollout for each verdict.

    verdicts: a number stands for a verdict with this reward and correctness.
    num_generated: number of tokens of each rollout, by default 4. All of them are trainable.
    """
    num_tokens = num_generated or [4] * len(verdicts)
    repetitions = repetition or [0.0] * len(verdicts)
    rollouts = tuple(
        RolloutRef(
            rollout_id=f"{name}/{i}",
            prompt_id=name,
            sample_index=i,
            num_inputs=5 + num_tokens[i],
            num_trainable=num_tokens[i],
            num_generated=num_tokens[i],
            repetition=repetitions[i],
            finish_reason=FinishReason.STOP,
            tokens_by_version=((0, 1),),
            verdict=v if isinstance(v, Verdict) else verdict(v),
            location=NOWHERE,
        )
        for i, v in enumerate(verdicts)
    )
    prompt = Prompt(id=name, token_ids=(1,), answer="1", task="t")
    return Group(group_id=name, prompt=prompt, rollouts=rollouts, weight=weight)
