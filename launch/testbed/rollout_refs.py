"""References to rollouts, as a collector reports them to rank 0."""

from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import Rollout

NOWHERE = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


def make_ref(
    rollout: Rollout, location: RolloutLocation = NOWHERE, *, reward: float = 1.0
) -> RolloutRef:
    trainable = [s for s in rollout.segments if s.trainable]
    return RolloutRef(
        rollout_id=rollout.rollout_id,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        num_inputs=rollout.num_tokens - 1,
        num_trainable=sum(len(s.tokens) for s in trainable),
        finish_reason=rollout.finish_reason,
        versions=tuple(sorted({s.version for s in trainable})),
        verdict=Verdict(reward=reward, correctness=reward),
        location=location,
    )
