"""The result of a rule."""

from __future__ import annotations

from typing import NamedTuple


class BrokenRule(NamedTuple):
    """A rule that a configuration breaks.

    key: the key to change. rule: why its value cannot be used. remedy: what to do instead; it may
    be empty when the rule already says it.
    """

    key: str
    rule: str
    remedy: str = ""
