"""A question and how responses to it are drawn."""

from __future__ import annotations

import msgspec


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `id` is unique within a run's data; `difficulty` is a free label that metrics
    group by.

    worked: a worked response, where the source writes one.
    """

    id: str
    token_ids: tuple[int, ...]
    answer: str
    task: str
    difficulty: str = ""
    demonstration: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How responses are drawn.

    Training needs the untruncated distribution (top_p 1, top_k off, no penalties).
    """

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
