"""Reports and orders about the processes of a node besides its ranks.

Local rank 0 of a node reports. Rank 0 of the run reads the reports of all nodes, and orders.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from megatron_rl.contracts.wire_types import Count
from sglang_bridge.engine import Engine


class ProcessState(StrEnum):
    """The state of an engine's or a collector's process.

    STARTING: it was started and has not answered yet, or waits for its next start.
    RUNNING: it has answered since its start, and its process lives.
    GIVEN_UP: it ended too often, and is not started again.
    """

    STARTING = "starting"
    RUNNING = "running"
    GIVEN_UP = "given_up"


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """A managed engine of a node.

    index: its number on the node. epoch: counts its starts from 0. engine: the address that this
    start listens on. reason: why the start before this one ended, or why it was given up.
    """

    index: Count
    epoch: Count
    engine: Engine
    state: ProcessState
    reason: str = ""


class CollectorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The collector of a node. epoch, reason: as in `EngineReport`."""

    epoch: Count
    state: ProcessState
    reason: str = ""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a node.

    collector: None before it was started. events: the last lines for people about them, of
    num_events lines since the start.
    """

    node: Count
    engines: tuple[EngineReport, ...] = ()
    collector: CollectorReport | None = None
    events: tuple[str, ...] = ()
    num_events: Count = 0


class NodeOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Orders to a node, which executes each of them once.

    restart_engines: by the index of an engine, the epoch to end. An engine of a later epoch is left
    alone. restart_collector: the epoch of the collector to end, None: leave it alone. reasons: by
    the name of the process ("engine 1", "collector"), why.
    """

    restart_engines: dict[int, int] = {}
    restart_collector: int | None = None
    reasons: dict[str, str] = {}
