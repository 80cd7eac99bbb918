"""What is believed of each prompt, as a checkpoint keeps it."""

from __future__ import annotations

import msgspec


class BeliefState(msgspec.Struct, frozen=True, kw_only=True):
    """prompts: ids, in the order of the rows of the arrays.

    means, variances: float32 [n]. seen, since: int32 [n]. strata: (source, tag, its moments), those of all together
    first. drift: the two sums that the shared drift is the quotient of. clock: the last step. window: (predicted,
    observed, groups) of the last steps. wander: as strata, the two sums that the growth of variance is learnt from.
    rated: the two sums that the doubt in given pass rates is learnt from.
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
