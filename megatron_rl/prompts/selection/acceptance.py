"""Which of the prompts that are offered a step takes."""

from __future__ import annotations

import hashlib

from megatron_rl.config.schema import SelectionSettings

_OLD = 0.5  # at least, of what was not seen for selection.expert.max_age_steps steps


def coin(seed: int, epoch: int, prompt_id: str) -> float:
    """In [0, 1), the same whenever it is thrown: no generator is shared, so that a resumed run
    throws the same.
    """
    named = f"{seed}/{epoch}/{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big") / 2**64


def acceptance(chance: float, unseen: int, settings: SelectionSettings) -> float:
    """The probability that an offered prompt is taken; never 0. unseen: for how many steps.

    max(floor, min(1, (chance / target)^power)), and at least 1/2 once unseen for `age` steps.
    chance: of a group that `selection.skip` does not name.
    """
    taken = max(settings.expert.min_acceptance, min(1.0, (chance / settings.expert.acceptance_target) ** settings.expert.acceptance_exponent))
    return max(taken, _OLD) if unseen >= settings.expert.max_age_steps else taken
