"""Prompts and sampling parameters."""

from __future__ import annotations

import msgspec

from sglang_bridge.request import Sampling

__all__ = ["ROW_KEYS", "Prompt", "Sampling"]

ROW_KEYS = ("prompt", "messages", "tools", "answer", "response", "id", "task", "difficulty")
"""The keys of a row in a file of questions."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the model.

    id: unique within a run's data.
    answer: reference answer.
    task: name of the task or source.
    difficulty: free label by which metrics are grouped.
    demonstration: example response, empty if the source has none.
    source: name of the prompt's source in a mixture, empty without one.
    """

    id: str
    token_ids: tuple[int, ...]
    answer: str
    task: str
    difficulty: str = ""
    demonstration: str = ""
    source: str = ""
