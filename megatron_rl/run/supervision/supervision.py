"""The parts that accompany a rank from its first line to its last."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.records.progress import Progress
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.open_parts import OpenParts
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.run.supervision.watchdog import Watchdog


@dataclass(frozen=True)
class Supervision:
    """Reports progress and the end of a run, watches it, and closes its parts.

    stop: a request to stop that leaves time to save; it is accepted once there is something to
    save.
    """

    ranks: LocalRanks
    progress: Progress
    reporter: ExitReporter
    watchdog: Watchdog
    stop: StopRequest
    parts: OpenParts
