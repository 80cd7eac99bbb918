"""What the trainer knows about one engine."""

from __future__ import annotations

import msgspec


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One SGLang server. node: the host whose collector sends requests to it. tp, ep: its parallel sizes."""

    url: str
    node: int = 0
    tp: int = 1
    ep: int = 1
    quantization: str | None = None
