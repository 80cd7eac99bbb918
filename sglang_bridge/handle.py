"""What the trainer knows about an engine, and what it may do with it."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Role(enum.StrEnum):
    """What an engine is for: drawing samples to train on, or judging them with weights that never change."""

    ROLLOUT = "rollout"
    JUDGE = "judge"


class EngineHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One SGLang engine. epoch: how often it was (re)started; a new epoch holds start weights and needs a sync."""

    urls: tuple[str, ...]
    tp: int = 1
    ep: int = 1
    node: int = 0
    gpus: tuple[int, ...] = ()
    colocated: bool = False
    quantization: str | None = None
    role: Role = Role.ROLLOUT
    epoch: int = 0

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("EngineHandle.urls is empty: an engine has at least one URL")
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ValueError(
                f"EngineHandle tp={self.tp} ep={self.ep}: both are at least 1 and ep divides tp "
                "(SGLang takes expert-parallel groups out of the tensor-parallel ranks)"
            )

    @property
    def url(self) -> str:
        """The URL that control requests go to."""
        return self.urls[0]

    @property
    def takes_weights(self) -> bool:
        """Whether weight updates may be sent to this engine."""
        return self.role is Role.ROLLOUT


def refuse_unsupported_parallelism(server_info: dict[str, Any], *, tp: int) -> None:
    """Check a running server's `/server_info` against what weight updates and routes support.

    Raises `ValueError` for pipeline or plain data parallelism, and where its tensor parallelism is not `tp`.
    """
    for key in ("pp_size", "dp_size"):
        size = int(server_info.get(key) or 1)
        if size > 1:
            raise ValueError(
                f"the engine runs with {key}={size}: weight updates need a group per stage or replica, which is not "
                "built; start it with 1 and use more engines or tensor/expert parallelism instead"
            )
    size = int(server_info.get("tp_size") or 1)
    if size != tp:
        raise ValueError(f"the engine runs with tp_size={size} but is declared with engine.tp={tp}: declare {size}")
