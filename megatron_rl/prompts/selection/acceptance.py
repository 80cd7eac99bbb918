"""Random acceptance of the prompts that are offered to a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# Smallest acceptance probability of a prompt after `Acceptance.max_age_epochs` epochs
_MINIMUM_AFTER_MAX_AGE = 0.5


def coin(seed: int, epoch: int, prompt_id: str) -> float:
    """Return a random number in [0, 1) that depends on the arguments alone.

    A resumed run therefore gets the same numbers, without a generator's state.
    """
    key = f"{seed}/{epoch}/{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True)
class Acceptance:
    """The probability with which a step accepts an offered prompt. It is never 0.

    max(minimum, min(1, (chance / target)^exponent))

    It is at least 1/2 once the prompt was declined in `max_age_epochs` successive epochs.

    The defaults accept a prompt with a pass rate of one tenth at least every other time, whatever
    the variance of its belief (tests/prompts/selection/test_acceptance.py).
    """

    target: float = 0.6
    exponent: float = 5.0
    minimum: float = 0.1
    max_age_epochs: int = 10

    def probability(self, chance: float, declines: int) -> float:
        """Return the probability of a prompt.

        chance: probability of a group that `selection.skip` does not name.
        declines: how often the prompt was declined since its last group. Each epoch offers it once.
        """
        acceptance = max(self.minimum, min(1.0, (chance / self.target) ** self.exponent))
        if declines >= self.max_age_epochs:
            return max(acceptance, _MINIMUM_AFTER_MAX_AGE)
        return acceptance
