"""Whether beliefs fit what is drawn, and whether steps can be filled."""

from __future__ import annotations

from collections.abc import Mapping


class SelectionAlarm:
    """Watches `select/`: says what is wrong when it begins, and not again while it lasts."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, values: Mapping[str, float]) -> str | None:
        """Take in one step's metrics; a warning, or None."""
        found = {
            name: text
            for name, text in (
                ("miscalibrated", _miscalibrated(values)),
                ("unfilled", _unfilled(values)),
            )
            if text
        }
        new = [text for name, text in found.items() if name not in self._told]
        self._told = set(found)
        return f"warning: {'; '.join(new)}" if new else None


def _miscalibrated(values: Mapping[str, float]) -> str:
    apart = values.get("select/miscalibrated", 0.0)
    if not apart:
        return ""
    return (
        f"over 20 steps the share of mixed groups was {apart:.2f} from what was believed (select/predicted_mixed, "
        "select/observed_mixed): beliefs are of little use for these prompts; data with difficulty labels, or "
        "selection=oversample, may serve better"
    )


def _unfilled(values: Mapping[str, float]) -> str:
    missing = values.get("select/unfilled", 0.0)
    if not missing:
        return ""
    return (
        f"{missing:.0f} mixed groups are missing (select/unfilled): what selection.budget allows, or the data, gave "
        "no more, and the step trains on what it has"
    )
