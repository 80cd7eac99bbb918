"""Sends weights to the engines under increasing versions, and audits what the engines hold."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_rl.config.schema import EngineSettings, SyncSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.engines.members import Member, Members, MemberState
from megatron_rl.engines.node.weight_copies import RemoteWeightCopies
from megatron_rl.engines.rank_part import open_rank_part
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.job import Job
from megatron_rl.models.shape import ModelShape
from sglang_bridge.admin import AdminClient
from sglang_bridge.deltas.transport import DeltaTransport
from sglang_bridge.engine import Engine
from sglang_bridge.errors import (
    AuditUnsupported,
    RequestFailed,
    WeightMismatch,
    WeightUpdateFailed,
)
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights.audit import audit_engine, value_obstacles
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import RankPlace, rank_places
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.source import WeightSource
from sglang_bridge.weights.updater import WeightUpdater

# More links are not listed one by one
_MAX_LINKS = 64


class Sender(Protocol):
    """A rank's side of a weight sync, which all ranks execute together."""

    def send(self, command: Sync, source: WeightSource) -> dict[str, float]:
        """Send what this rank owns; returns metrics."""
        ...


class MakeExpectation(Protocol):
    """Makes an empty record of the weights that engines must hold."""

    def __call__(
        self, *, compares_values: bool, places: Iterable[RankPlace]
    ) -> WeightExpectation: ...


class FollowerSync:
    """Sends what a rank owns, on all ranks but rank 0, which leads."""

    def __init__(self, part: RankPart) -> None:
        self._part = part

    def send(self, command: Sync, source: WeightSource) -> dict[str, float]:
        """Follow rank 0 through a sync. Returns no metrics."""
        self._part.follow(source)
        if command.audit:
            collections.deque(source.stream_all(), maxlen=0)
        return {}

    def close(self) -> None:
        """Disconnect from every engine."""
        self._part.close()


class WeightSync:
    """Leads weight syncs to the engines of the run, on rank 0.

    Versions count up by one from 0, the start checkpoint, which every engine receives before its
    first prompt. An engine that does not take the weights, or holds others afterwards, is out. It
    may join again later. Only the first sync requires that all engines take them.

    members: the engines of the run. Only engines that hold the sent weights serve afterwards.
    make_expectation: makes an empty record of the weights that engines must hold, for one audit.
        Its argument is False if names alone are compared.
    open_admin: opens the control client of an engine. log: writes a line for people. measure:
        returns the transport's metrics of the last sync. is_colocated: engines and trainer take
        turns on their devices.
    audit_obstacle: the reason why an audit compared names only. The reason stays the same, so that
        all further audits compare names only.
    is_current: the engines hold the trainer's weights. `expire` ends that.
    """

    def __init__(
        self,
        updater: WeightUpdater,
        settings: SyncSettings,
        members: Members,
        *,
        make_expectation: MakeExpectation,
        open_admin: Callable[[Engine], AdminClient],
        log: Callable[[str], None] = print,
        measure: Callable[[], Mapping[str, float]] = dict,
        is_colocated: bool = False,
    ) -> None:
        self._updater = updater
        self._settings = settings
        self._members = members
        self._make_expectation = make_expectation
        self._open_admin = open_admin
        self._log = log
        self._measure = measure
        self._is_colocated = is_colocated
        # By name: the epoch and the client for it
        self._admins: dict[str, tuple[int, Engine, AdminClient]] = {}
        self._num_mismatches = collections.Counter[str]()  # in a row, by name
        self._next_version = 0
        self._is_first = True
        self.audit_obstacle = ""
        self.is_current = False

    @property
    def version(self) -> int | None:
        """The last version that was sent; None before the first."""
        return self._next_version - 1 if self._next_version else None

    def resume_from(self, version: int | None, *, is_synced: bool) -> None:
        """Continue the versions of a run that is resumed.

        version: the last version that its engines received. is_synced: the weights of the
        checkpoint have this version, so they are sent under it again.
        """
        if version is None:
            self._next_version = 0
        else:
            self._next_version = version if is_synced else version + 1

    def next_command(self) -> Sync:
        """The next command for all ranks. The first sync is always audited.

        So is one that lets engines serve which have started or failed since.
        """
        version = self._next_version
        every = self._settings.audit_every
        is_first = self._is_first
        self._next_version += 1
        self._is_first = False
        # The engine swallows errors of its last step with weights of `ipc`
        is_due = self._settings.transport == "ipc" or (every > 0 and version % every == 0)
        return Sync(version, audit=is_first or is_due or bool(self._members.waiting))

    def expire(self) -> None:
        """Note that the trainer's weights have changed since the last sync."""
        self.is_current = False

    def sleep(self) -> None:
        """Let all engines give their memory to the trainer until the next sync.

        Engines that are out hold memory, too. Raises `EngineError`.
        """
        self.is_current = False
        members = [member for member in self._members if member.state is not MemberState.GONE]
        self._updater.sleep([self._admin(member) for member in members])

    def send(self, command: Sync, source: WeightSource) -> dict[str, float]:
        """Send the weights to engines, and audit them if the command says so.

        An audit streams the weights once more to this rank, in the order in which an engine's
        parameters are hashed.

        Returns metrics. In the first sync, and with engine.colocated in each, it raises
        `WeightUpdateFailed` and `WeightMismatch`. Otherwise it raises `WeightMismatch` for an
        engine that holds other weights twice in a row while no other one serves.
        """
        raises = self._raises_failures
        targets = self._targets(command)
        failures, error = self._push(targets, source, command.version)
        start = time.perf_counter()
        expectation = self._observe(targets, source) if command.audit else None
        if error is not None and raises:
            raise error
        num_compared = 0
        for member in targets:
            if member.url not in failures and expectation is not None:
                num_compared += self._audit(member, expectation, command.version, raises=raises)
        audit_seconds = time.perf_counter() - start
        for member in targets:
            if member.url in failures:
                self._exclude(member, failures[member.url])
            elif member.state is MemberState.WAITING:
                self._members.admit(member.name, member.epoch, command.version)
        if command.only is None:
            self.is_current = True
        values = self._values(command, num_compared) | self._costs(targets)
        if command.audit:
            values["time/sync/audit"] = audit_seconds
        return values

    @property
    def _raises_failures(self) -> bool:
        """True in the first sync, and where a failed engine keeps memory of the trainer."""
        return self._is_colocated or self._members.version is None

    def close(self) -> None:
        """Disconnect from every engine."""
        self._updater.close()

    def _targets(self, command: Sync) -> list[Member]:
        """The engines that get the weights of a command."""
        if command.only is None:
            return self._members.begin_update(command.version)
        return [member for member in self._members.waiting if member.name in command.only]

    def _push(
        self, targets: Sequence[Member], source: WeightSource, version: int
    ) -> tuple[Mapping[str, str], WeightUpdateFailed | None]:
        """Send the weights; returns the reasons of failures by URL, and the error about them."""
        admins = [self._admin(member) for member in targets]
        self._drop_old_admins()
        try:
            self._updater.push(source, version, admins)
        except WeightUpdateFailed as error:
            return error.failures, error
        return {}, None

    def _observe(self, targets: Sequence[Member], source: WeightSource) -> WeightExpectation | None:
        """Compute what the engines must hold; None without engines. A collective."""
        weights = source.stream_all()
        if not targets:
            collections.deque(weights, maxlen=0)
            return None
        places = {place for member in targets for place in rank_places(member.engine)}
        expectation = self._make_expectation(
            compares_values=self._can_compare_values(targets), places=sorted(places)
        )
        for name, tensor in weights:
            expectation.add(name, tensor)
        return expectation

    def _admin(self, member: Member) -> AdminClient:
        """Return the control client of an engine. A new start has a new one."""
        epoch, engine, admin = self._admins.get(member.name, (-1, None, None))
        if admin is not None and (epoch, engine) == (member.epoch, member.engine):
            return admin
        if admin is not None:
            self._updater.forget(admin)
        new_admin = self._open_admin(member.engine)
        self._admins[member.name] = (member.epoch, member.engine, new_admin)
        return new_admin

    def _drop_old_admins(self) -> None:
        """Drop the connections to engines that do not serve."""
        for name in list(self._admins):
            if self._members[name].state in (MemberState.OUT, MemberState.GONE):
                _, _, admin = self._admins.pop(name)
                self._updater.forget(admin)

    def _can_compare_values(self, targets: Sequence[Member]) -> bool:
        """False if an engine, or an earlier audit, rules out that values are compared."""
        engines = (member.engine for member in targets)
        return not self.audit_obstacle and not any(map(value_obstacles, engines))

    def _audit(
        self, member: Member, expectation: WeightExpectation, version: int, *, raises: bool
    ) -> int:
        """Audit an engine; returns the number of parameters that were compared.

        raises: whether every failure raises.
        """
        try:
            report = audit_engine(self._admin(member), expectation)
            report.raise_on_mismatch(version)
        except AuditUnsupported as obstacle:
            self.audit_obstacle = str(obstacle)
            return 0
        except RequestFailed as error:
            if raises:
                raise
            self._exclude(member, str(error))
            return 0
        except WeightMismatch as error:
            self._num_mismatches[member.name] += 1
            # In a sync of all, engines that are not audited yet wait
            others = self._members.serving + self._members.waiting
            is_alone = all(other is member for other in others)
            if raises or (is_alone and self._num_mismatches[member.name] > 1):
                raise
            self._exclude(member, str(error))
            return 0
        self._num_mismatches.pop(member.name, None)
        return report.num_compared

    def _costs(self, targets: Sequence[Member]) -> dict[str, float]:
        """The seconds of the last update by part, and the bytes by owner and engine."""
        names = {member.url: member.name.removeprefix("http://") for member in targets}
        summary = self._updater.summary
        values = {f"time/sync/{part}": seconds for part, seconds in summary.seconds.items()}
        values["sync/bytes"] = float(sum(summary.bytes_sent.values()))
        by_rank = collections.Counter[int]()
        for (rank, _), count in summary.bytes_sent.items():
            by_rank[rank] += count
        values |= {f"sync/bytes/{rank}": float(count) for rank, count in by_rank.items()}
        if len(summary.bytes_sent) <= _MAX_LINKS:
            for (rank, url), count in summary.bytes_sent.items():
                values[f"sync/bytes/{rank}/{names[url].replace(' ', '_')}"] = float(count)
        return values

    def _exclude(self, member: Member, reason: str) -> None:
        self._members.fail(member.name, member.epoch, reason)
        self._log(f"engine {member.name} is out: {reason}")

    def _values(self, command: Sync, num_compared: int) -> dict[str, float]:
        values = {
            "sync/version": float(command.version),
            "sync/engines": float(len(self._members.serving)),
            **self._measure(),
        }
        if command.audit and num_compared and not self.audit_obstacle:
            values["sync/audit_mismatches"] = float(sum(self._num_mismatches.values()))
            values["sync/audit_compared"] = float(num_compared)
        return values


class WeightCopies(NamedTuple):
    """Places of complete weights, for sync.transport=delta.

    on_nodes: the copies on the nodes with engines. scratch: a directory of rank 0 for what it sent
    last.
    """

    on_nodes: RemoteWeightCopies
    scratch: Path


def open_weight_sync(
    members: Members,
    keys: RunKeys,
    settings: SyncSettings,
    engine_settings: EngineSettings,
    shape: ModelShape,
    *,
    directory: Path,
    model_path: Path,
    job: Job,
    log: Callable[[str], None],
    copies: WeightCopies | None = None,
) -> WeightSync:
    """Open weight sync from all ranks to `members`, which this rank leads.

    directory: for the disk transport, on a file system that ranks and engines share. log: writes a
    line for people. copies: for sync.transport=delta.
    """
    measure: Callable[[], Mapping[str, float]] = dict
    transport = None
    if copies is not None:
        transport = DeltaTransport(
            directory=directory,
            scratch=copies.scratch,
            config_from=model_path,
            nodes=copies.on_nodes.nodes,
            rebuild=copies.on_nodes.take,
            timeout_seconds=settings.timeout_s,
            log=log,
        )
        measure = transport.measure
    part = open_rank_part(
        job,
        keys,
        settings,
        engine_settings,
        directory=directory,
        model_path=model_path,
        log=log,
        transport=transport,
    )
    on_gpu = job.device.type == "cuda"

    def make_expectation(
        *, compares_values: bool, places: Iterable[RankPlace]
    ) -> WeightExpectation:
        return WeightExpectation(
            dtype=torch_dtype(engine_settings.dtype),
            num_experts=shape.num_experts,
            device="cuda" if on_gpu else "cpu",
            compares_values=compares_values,
            places=places,
            num_key_value_heads=shape.num_key_value_heads,
        )

    def open_admin(engine: Engine) -> AdminClient:
        return AdminClient(engine, keys, timeout=settings.timeout_s)

    return WeightSync(
        WeightUpdater(part),
        settings,
        members,
        make_expectation=make_expectation,
        open_admin=open_admin,
        log=log,
        measure=measure,
        is_colocated=engine_settings.colocated,
    )
