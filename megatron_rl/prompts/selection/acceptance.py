"""Random acceptance of the prompts that are offered to a step."""

from __future__ import annotations

import hashlib

from megatron_rl.config.schema import SelectionExpertSettings

# Smallest acceptance probability of a prompt after selection.expert.max_age_epochs epochs
_MIN_ACCEPTANCE_AFTER_MAX_AGE = 0.5


def coin(seed: int, epoch: int, prompt_id: str) -> float:
    """Return a random number in [0, 1) that depends on the arguments alone.

    A resumed run therefore gets the same numbers, without a generator's state.
    """
    key = f"{seed}/{epoch}/{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


def acceptance_probability(
    probability: float, declines: int, settings: SelectionExpertSettings
) -> float:
    """Return the probability with which a step accepts an offered prompt. It is never 0.

    max(min_acceptance, min(1, (probability / acceptance_target)^acceptance_exponent))

    It is at least 1/2 once the prompt was declined in `max_age_epochs` successive epochs.

    probability: probability of a group that `selection.skip` does not name.
    declines: how often the prompt was declined since its last group. Each epoch offers it once.
    """
    ratio = probability / settings.acceptance_target
    acceptance = max(settings.min_acceptance, min(1.0, ratio**settings.acceptance_exponent))
    if declines >= settings.max_age_epochs:
        return max(acceptance, _MIN_ACCEPTANCE_AFTER_MAX_AGE)
    return acceptance
