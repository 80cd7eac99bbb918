"""Groups of judged rollouts with every kind of verdict, the same wherever they are made."""

from collections.abc import Sequence

import msgspec

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Rollout
from tests.support.rollouts import NOWHERE, make_ref

GROUP = 4
# Correctness and shaped reward of each group's rollouts: three mixed ones, one of them with a
# rollout that nobody could judge, and an all-right and an all-wrong one whose rewards differ.
_VERDICTS = (
    ((1.0, 1.0), (0.0, 0.0), (1.0, 0.7), (0.0, -0.1)),
    ((1.0, 0.9), (None, None), (0.0, 0.0), (0.0, -0.2)),
    ((1.0, 1.0), (1.0, 0.5), (1.0, 0.8), (1.0, 0.6)),
    ((0.0, 0.3), (0.0, 0.0), (0.0, -0.4), (1.0, 1.0)),
    ((0.0, 0.0), (0.0, -0.3), (0.0, 0.0), (0.0, -0.2)),
)


def judged_groups(
    rollouts: Sequence[Rollout], locations: Sequence[RolloutLocation] | None = None
) -> list[Group]:
    """Groups of four rollouts each, in their order.

    locations: where the rollouts lie; None: nowhere.
    """
    placed = zip(rollouts, locations or [NOWHERE] * len(rollouts), strict=True)
    refs = [make_ref(rollout, location) for rollout, location in placed]
    return [
        _group(index, refs[index * GROUP : (index + 1) * GROUP])
        for index in range(len(refs) // GROUP)
    ]


def _group(index: int, refs: Sequence[RolloutRef]) -> Group:
    """No two groups have the same rewards."""
    judged = []
    for place, (ref, (correctness, reward)) in enumerate(
        zip(refs, _VERDICTS[index % len(_VERDICTS)], strict=True)
    ):
        own = None if reward is None else reward - 0.01 * index * (place + 1)
        judged.append(
            msgspec.structs.replace(ref, verdict=Verdict(reward=own, correctness=correctness))
        )
    prompt = Prompt(id=f"g{index}", token_ids=(1,), answer="1", task="t")
    return Group(group_id=f"g{index}", prompt=prompt, rollouts=tuple(judged))
