"""An engine as the trainer sees it: its address and its parallel sizes."""

from __future__ import annotations

import msgspec


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One SGLang server, or several that serve one model from as many nodes.

    node: the host whose collector sends requests to it. tp, ep: its tensor- and expert-parallel
    sizes. gpus: its devices on its node, where the run placed it.

    Raises `ValueError` for sizes that no server has.
    """

    url: str
    node: int = 0
    tp: int = 1
    ep: int = 1
    quantization: str | None = None
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ValueError(
                f"engine.ep={self.ep} with engine.tp={self.tp}: both are at least 1 and ep divides "
                "tp (SGLang forms expert-parallel groups from the tensor-parallel ranks); use a "
                "divisor of engine.tp"
            )
