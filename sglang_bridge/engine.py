"""What the trainer knows about one engine: its address and its shape."""

from __future__ import annotations

import msgspec


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One SGLang server. node: the host whose collector sends requests to it. tp, ep: its parallel
    sizes.

    Raises `ValueError` for a shape that no server has.
    """

    url: str
    node: int = 0
    tp: int = 1
    ep: int = 1
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ValueError(
                f"engine.ep={self.ep} with engine.tp={self.tp}: both are at least 1 and ep divides tp (SGLang takes "
                "expert-parallel groups out of the tensor-parallel ranks); use a divisor of engine.tp"
            )
