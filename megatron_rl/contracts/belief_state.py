"""What is believed of each prompt, as a checkpoint keeps it."""

from __future__ import annotations

import math

import msgspec
import numpy as np

NEVER = -1  # in `seen`: not drawn yet
BEFORE = 0  # in `seen`: by another run alone, before this one's first step, which is 1


class BeliefState(msgspec.Struct, frozen=True, kw_only=True):
    """prompts: ids, in the order of the rows of the arrays.

    means, variances: float32 [n]. seen, since: int32 [n], steps; NEVER and BEFORE are none. strata:
    (source, tag, its moments), those of all together first. drift: the two sums that the shared
    drift is the quotient of. clock: the last step. window: (predicted, observed, groups) of the
    last steps. wander: as strata, the two sums that the growth of variance is learnt from. rated:
    the two sums that the doubt in given pass rates is learnt from.
    """

    prompts: tuple[str, ...]
    means: bytes
    variances: bytes
    seen: bytes
    since: bytes
    strata: tuple[tuple[str, str, tuple[float, float, float, float]], ...]
    drift: tuple[float, float]
    clock: int
    window: tuple[tuple[float, float, float], ...] = ()
    wander: tuple[tuple[str, str, tuple[float, float]], ...] = ()
    rated: tuple[float, float] = (0.0, 0.0)

    def problem(self) -> str:
        """Why nobody can have believed this; empty where somebody can."""
        count = len(self.prompts)
        if any(
            len(array) != 4 * count for array in (self.means, self.variances, self.seen, self.since)
        ):
            return f"its arrays are not those of {count} prompts"
        if not self.strata:
            return "it has no strata"
        if len(set(self.prompts)) != count:
            return "a prompt has two beliefs"
        means, variances = (
            np.frombuffer(array, np.float32) for array in (self.means, self.variances)
        )
        possible = (
            (means >= 0)
            & (means <= np.float32(math.pi / 2))
            & (variances >= 0)
            & np.isfinite(variances)
        )
        if not possible.all() or (np.frombuffer(self.seen, np.int32) < NEVER).any():
            return "it holds numbers that no belief has"
        return ""
