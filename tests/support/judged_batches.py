"""Groups of judged rollouts with every kind of verdict and weight, the same on every rank."""

from collections.abc import Sequence

import msgspec

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Rollout
from tests.support.rollout_refs import NOWHERE, make_ref

GROUP = 4
# (correctness, shaped reward) of each group's rollouts. Three groups are mixed, one of them with a
# rollout without a verdict. The third is all correct and the last all incorrect, with different
# rewards.
_VERDICTS = (
    ((1.0, 1.0), (0.0, 0.0), (1.0, 0.7), (0.0, -0.1)),
    ((1.0, 0.9), (None, None), (0.0, 0.0), (0.0, -0.2)),
    ((1.0, 1.0), (1.0, 0.5), (1.0, 0.8), (1.0, 0.6)),
    ((0.0, 0.3), (0.0, 0.0), (0.0, -0.4), (1.0, 1.0)),
    ((0.0, 0.0), (0.0, -0.3), (0.0, 0.0), (0.0, -0.2)),
)

# Weights of the groups, as prompt selection gives them
_WEIGHTS = (1.0, 1.5, 2.0, 1.25, 0.75)


def judged_groups(
    rollouts: Sequence[Rollout], locations: Sequence[RolloutLocation] | None = None
) -> list[Group]:
    """Make groups of four rollouts each, in their order.

    locations: locations of the rollouts in shared memory, if they have any.
    """
    pairs = zip(rollouts, locations or [NOWHERE] * len(rollouts), strict=True)
    refs = [make_ref(rollout, location) for rollout, location in pairs]
    return [
        _make_group(index, refs[index * GROUP : (index + 1) * GROUP])
        for index in range(len(refs) // GROUP)
    ]


def _make_group(index: int, refs: Sequence[RolloutRef]) -> Group:
    """Make one group. No two groups have the same rewards."""
    rollouts = []
    verdicts = _VERDICTS[index % len(_VERDICTS)]
    for position, (ref, (correctness, reward)) in enumerate(zip(refs, verdicts, strict=True)):
        penalty = 0.0
        if reward is not None and correctness is not None:
            reward -= 0.01 * index * (position + 1)
            penalty = min(max(correctness - reward, 0.0), 1.0)
        verdict = Verdict(reward=reward, correctness=correctness, penalty=penalty)
        rollouts.append(msgspec.structs.replace(ref, verdict=verdict))
    prompt = Prompt(id=f"g{index}", token_ids=(1,), answer="1", task="t")
    weight = _WEIGHTS[index % len(_WEIGHTS)]
    return Group(group_id=f"g{index}", prompt=prompt, rollouts=tuple(rollouts), weight=weight)
