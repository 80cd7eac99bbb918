"""Whether groups that are all right or all wrong weigh too little or too much beside mixed ones."""

from __future__ import annotations

from collections.abc import Mapping

_LEAST, _MOST = 0.02, 0.5


class ZeroVarianceBalanceAlarm:
    """Compares the mean |A_t| over tokens of flat groups with that over the others."""

    def __init__(self) -> None:
        self._outside = False

    def note(self, values: Mapping[str, float]) -> str | None:
        """Take in one step's metrics; a warning when the quotient leaves 0.02 to 0.5, not again
        while it is outside.
        """
        flat, mixed = (values.get(f"policy/advantage_{name}", 0.0) for name in ("flat", "mixed"))
        if not values.get("train/zero_variance_samples") or not mixed:
            return None
        was, self._outside = self._outside, not _LEAST <= flat / mixed <= _MOST
        if was or not self._outside:
            return None
        what, remedy = (
            ("hardly move", "raise") if flat / mixed < _LEAST else ("weigh much in", "lower")
        )
        return (
            f"warning: tokens of flat groups have {flat / mixed:.3g} times the advantage of the others "
            f"(policy/advantage_flat {flat:.3g}, policy/advantage_mixed {mixed:.3g}): they {what} the policy; "
            f"{remedy} credit.zvp_alpha"
        )
