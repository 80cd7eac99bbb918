"""The trainer's side of versioned weight sync."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from megatron_rl.config.schema import SyncSettings
from megatron_rl.contracts.commands import Sync
from sglang_bridge.errors import AuditUnsupported
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.updater import WeightUpdater

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Sender(Protocol):
    """What a rank does with its part of a collective export: every rank exhausts it."""

    def send(self, command: Sync, weights: NamedTensors) -> dict[str, float]:
        """Consume the export; returns metrics."""
        ...


class FollowerSync:
    """Every rank but 0: takes part in the export and sends nothing."""

    def send(self, command: Sync, weights: NamedTensors) -> dict[str, float]:
        collections.deque(weights, maxlen=0)
        return {}


class WeightSync:
    """Rank 0's. Versions count up by one from 0, the start checkpoint, which every engine gets
    before its first prompt.

    expect: a fresh record of what engines must hold, for an audit; audits follow
    `sync.audit_every`. audit_obstacle: why the first audit compared names only; as these never
    change, none follows it then.
    """

    def __init__(
        self,
        updater: WeightUpdater,
        settings: SyncSettings,
        *,
        expect: Callable[[], WeightExpectation],
    ) -> None:
        self._updater = updater
        self._settings = settings
        self._expect = expect
        self._next_version = 0
        self._first = True
        self.audit_obstacle = ""

    @property
    def version(self) -> int | None:
        """The last one sent; None before the first."""
        return self._next_version - 1 if self._next_version else None

    def resume_from(self, version: int | None, *, synced: bool) -> None:
        """Count on from a run before, whose engines got `version` last; synced: these weights are
        sent once more.
        """
        self._next_version = 0 if version is None else version if synced else version + 1

    def next_command(self) -> Sync:
        """What to tell every rank next. The first sync is always audited."""
        version, every = self._next_version, self._settings.audit_every
        self._next_version += 1
        first, self._first = self._first, False
        return Sync(version=version, audit=first or (every > 0 and version % every == 0))

    def send(self, command: Sync, weights: NamedTensors) -> dict[str, float]:
        """Send one export to every engine and audit it if told to.

        Raises `WeightUpdateFailed`, `WeightMismatch`.
        """
        values = {"sync/version": float(command.version)}
        if not command.audit or self.audit_obstacle:
            self._updater.push(weights, command.version)
            return values
        expectation = self._expect()
        self._updater.push(expectation.observe(weights), command.version)
        compared = 0
        for admin in self._updater.admins:
            try:
                report = audit_engine(admin, expectation)
            except AuditUnsupported as obstacle:
                self.audit_obstacle = str(obstacle)
            else:
                report.raise_on_mismatch(command.version)
                compared += report.compared
        if self.audit_obstacle:
            return values
        return values | {"sync/audit_mismatches": 0.0, "sync/audit_compared": float(compared)}

    def close(self) -> None:
        """Leave every engine."""
        self._updater.close()
