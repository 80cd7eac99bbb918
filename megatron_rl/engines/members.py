"""The engines that belong to a run, and the state of each.

Rank 0 alone changes these states. An engine serves only after it has received the current weights
in an update that was audited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.engines.node.restarts import RestartBudget
from sglang_bridge.engine import Engine


class MemberState(StrEnum):
    """The state of an engine in a run.

    OUT: it gets no requests: it starts, does not answer, or failed.
    WAITING: it answers and waits for the weights.
    SERVING: it holds the current weights and gets requests.
    GONE: it has left the run and does not come back by itself.
    """

    OUT = "out"
    WAITING = "waiting"
    SERVING = "serving"
    GONE = "gone"


@dataclass
class Member:
    """One engine of the run.

    name: stays the same when the engine is started again. A URL may not.
    epoch: counts its starts.
    version: of the weights that it holds, None if unknown.
    reason: why it is `OUT` or `GONE`, empty at the start.
    num_failures: how often it failed since its start, after it had answered.
    joins: counts how often it came back in the last hour. None before, and for a managed engine.
    """

    name: str
    engine: Engine
    epoch: int = 0
    state: MemberState = MemberState.OUT
    version: int | None = None
    reason: str = ""
    num_failures: int = 0
    joins: RestartBudget | None = None

    @property
    def url(self) -> str:
        """The address of the engine."""
        return self.engine.url


class Members:
    """All engines of a run.

    Events carry the epoch that they are about. Those of an earlier epoch have no effect: they
    arrive late, and the engine has been started again since.

    version: of the weights that serving engines hold, None before the first update.
    """

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.version: int | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def serving(self) -> list[Member]:
        """The engines that get requests."""
        return self._in_state(MemberState.SERVING)

    @property
    def waiting(self) -> list[Member]:
        """The engines that wait for weights."""
        return self._in_state(MemberState.WAITING)

    @property
    def absent(self) -> list[Member]:
        """The engines that may come back."""
        return self._in_state(MemberState.OUT)

    def of_url(self, url: str) -> Member | None:
        """Return the engine at an address, if it belongs to the run."""
        return next((m for m in self if m.url == url and m.state is not MemberState.GONE), None)

    def add(self, name: str, engine: Engine) -> Member:
        """Add an engine that does not answer yet. An engine that is gone may be added again.

        Raises `ValueError` for an engine that belongs to the run already.
        """
        earlier = self._members.get(name)
        if earlier is not None and earlier.state is not MemberState.GONE:
            raise ValueError(f"engine {name} belongs to the run already")
        if self.of_url(engine.url) is not None:
            raise ValueError(f"engine.urls: {engine.url} belongs to the run already")
        epoch = 0 if earlier is None else earlier.epoch + 1
        self._members[name] = Member(name, engine, epoch)
        return self._members[name]

    def start(self, name: str, engine: Engine, epoch: int, reason: str) -> bool:
        """Note that an engine was started again. Returns False for an epoch that is not new."""
        member = self[name]
        if epoch <= member.epoch or member.state is MemberState.GONE:
            return False
        self._members[name] = Member(name, engine, epoch, reason=reason)
        return True

    def answer(self, name: str, epoch: int, engine: Engine | None = None) -> bool:
        """Note that an engine answers. It waits for weights from now on.

        engine: with the sizes with which it runs, if they may be others than before.
        """
        member = self[name]
        if epoch != member.epoch or member.state is not MemberState.OUT:
            return False
        member.state = MemberState.WAITING
        member.engine = engine or member.engine
        return True

    def fail(self, name: str, epoch: int, reason: str) -> bool:
        """Note that an engine failed. Its weights are unknown from now on."""
        member = self[name]
        if epoch != member.epoch or member.state is MemberState.GONE:
            return False
        if member.state is not MemberState.OUT:
            member.num_failures += 1
        member.state = MemberState.OUT
        member.version = None
        member.reason = reason
        return True

    def leave(self, name: str, reason: str) -> bool:
        """Remove an engine from the run for good, unless it is added again."""
        member = self[name]
        if member.state is MemberState.GONE:
            return False
        member.state = MemberState.GONE
        member.version = None
        member.reason = reason
        return True

    def begin_update(self, version: int) -> list[Member]:
        """Begin to send all engines new weights. Returns the engines that have to receive them.

        None of them serves until it is admitted. Raises ValueError for a version that is not new.
        """
        if self.version is not None and version <= self.version:
            raise ValueError(f"weight version {version} follows version {self.version}")
        self.version = version
        members = self.serving + self.waiting
        for member in members:
            member.state = MemberState.WAITING
            member.version = None
        return members

    def admit(self, name: str, epoch: int, version: int | None) -> bool:
        """Let an engine serve: an audited update gave it the weights of `version`.

        version: None where engines hold the weights that they have loaded themselves. Returns False
        if the engine is not waiting any more. Raises ValueError for another version than the
        current one.
        """
        if version != self.version:
            raise ValueError(
                f"engine {name} holds weight version {version}, and the current one is "
                f"{self.version}"
            )
        member = self[name]
        if epoch != member.epoch or member.state is not MemberState.WAITING:
            return False
        member.state = MemberState.SERVING
        member.version = version
        member.reason = ""
        return True

    def _in_state(self, state: MemberState) -> list[Member]:
        return [member for member in self if member.state is state]
