"""References to rollouts, as a collector reports them to rank 0."""

from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.wire.store import make_rollout_ref

NOWHERE = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


def make_ref(
    rollout: Rollout, location: RolloutLocation = NOWHERE, *, reward: float = 1.0
) -> RolloutRef:
    """Make the reference to a rollout with this reward, which is its correctness, too."""
    return make_rollout_ref(
        rollout,
        verdict=Verdict(reward=reward, correctness=reward),
        num_generated=0,
        repetition=0.0,
        location=location,
    )
