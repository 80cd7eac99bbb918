"""A value that cannot be used, told before anything is started with it."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """key: the setting's full name. rule: why its value cannot be. remedy: what to do instead."""

    key: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.rule}. {self.remedy}."
