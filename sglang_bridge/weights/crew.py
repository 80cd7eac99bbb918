"""The trainer's ranks in a weight update, and what they tell each other.

Rank 0 leads: it opens and ends the update of every engine. Each owner of tensors sends its own.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from sglang_bridge.engine import Engine


class Target(msgspec.Struct, frozen=True):
    """An engine in an update. connection: names its start, and the lanes to it."""

    connection: str
    engine: Engine


class Order(msgspec.Struct, frozen=True):
    """Rank 0 begins an update. old_connections: connections that no rank needs
    any more."""

    version: int
    targets: tuple[Target, ...]
    old_connections: tuple[str, ...] = ()


class Readiness(msgspec.Struct, frozen=True):
    """A rank has its lanes. failures: reasons by URL. is_owner: it has tensors to send.

    unit_bytes: the largest tensors that this rank knows and that travel in one bucket.
    """

    is_owner: bool
    failures: dict[str, str]
    unit_bytes: int = 0


class Go(msgspec.Struct, frozen=True):
    """The owners send now.

    connections: of the engines that take part. owners: ranks, ascending. seconds: until the end of
    the update. unit_bytes: the largest of all ranks.
    """

    connections: tuple[str, ...]
    owners: tuple[int, ...]
    seconds: float
    unit_bytes: int = 0


class SendReport(msgspec.Struct, frozen=True):
    """The report of one rank about what it sent.

    failures: reasons by the engine's URL. bytes_sent: by URL. seconds: by part of the work.
    """

    num_tensors: int = 0
    failures: dict[str, str] = {}
    bytes_sent: dict[str, int] = {}
    seconds: dict[str, float] = {}


class Crew(Protocol):
    """All ranks of the trainer. Every call is a collective."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    def tell(self, data: bytes | None) -> bytes:
        """Send bytes from rank 0 to all ranks, which give None."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, on every rank."""
        ...


class Alone:
    """The only rank."""

    rank = 0

    def tell(self, data: bytes | None) -> bytes:
        """See `Crew`."""
        return data or b""

    def gather(self, data: bytes) -> list[bytes]:
        """See `Crew`."""
        return [data]
