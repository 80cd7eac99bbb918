"""The opening of a run on one rank, up to where its engines would start."""

import contextlib
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.records.progress import Progress
from megatron_rl.run import open_run
from megatron_rl.run.data import read_data
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.run.supervision.supervision import OpenParts, Supervision
from megatron_rl.run.supervision.watchdog import Watchdog


class EnginesReached(Exception):
    """Everything before the engines is open."""


@contextlib.contextmanager
def open_up_to_engines(c: Configuration) -> Iterator[list[str]]:
    """Open a run, and yield the lines for the user. The run is alive meanwhile.

    Raises what `open_run` raises.
    """
    job: Any = SimpleNamespace(rank=0, world_size=1, num_nodes=1, control_group=None)
    screen = io.StringIO()
    reporter = ExitReporter(LocalRanks())
    supervision = Supervision(
        ranks=LocalRanks(),
        progress=Progress(1, is_enabled=True, stream=screen),
        reporter=reporter,
        watchdog=Watchdog(reporter),
        stop=StopRequest(0.0),
        parts=OpenParts(),
    )

    def reach_engines(*arguments: object) -> None:
        raise EnginesReached

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(open_run, "join", lambda settings: job)
        patches.setattr(open_run, "leave", lambda: None)
        patches.setattr(open_run, "open_engines", reach_engines)
        try:
            with contextlib.suppress(EnginesReached):
                open_run.open_run(c, read_data(c), supervision)
            yield [line.partition("] ")[2] for line in screen.getvalue().splitlines()]
        finally:
            supervision.parts.close()
