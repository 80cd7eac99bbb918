"""One run, from its configuration to its exit code."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.progress import Progress, print_line
from megatron_rl.records.run_summary import closing_lines
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.frozen_ranks import FrozenRanks
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.restarts import require_reason_to_restart
from megatron_rl.run.supervision.shutdown import (
    close_after_success,
    exit_process,
    hide_write_errors,
    limit_exit,
    report_exception,
)
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.run.supervision.supervision import OpenParts, Supervision
from megatron_rl.run.supervision.watchdog import Watchdog, end_with_torchrun
from sglang_bridge.server.nccl import nccl_environment

if TYPE_CHECKING:
    from megatron_rl.run.data import RunData

_CLOSE_SECONDS = 30.0  # a complete run has this time to close its parts
# After SIGTERM, to finish the step and save a checkpoint. torchrun kills its processes after 30 s.
_STOP_SECONDS = 25.0
_FOLLOW_SECONDS = 5.0  # the other ranks end after rank 0, which saves


def run(configuration: Configuration) -> int:
    """Run one rank. Returns `ExitCode.OK`.

    With any other code the process exits here, within seconds and after it has reported why.
    """
    ranks = LocalRanks.from_environment(os.environ)
    saves_checkpoints = configuration.run.checkpoint_every > 0
    is_resumable = saves_checkpoints and configuration.run.resume == "auto"
    reporter = ExitReporter(ranks, is_resumable=is_resumable)
    is_leader = ranks.rank == 0
    progress = Progress(
        configuration.train.total_steps, is_enabled=configuration.logger.progress and is_leader
    )
    stop = StopRequest(_STOP_SECONDS + (0.0 if is_leader else _FOLLOW_SECONDS))
    parts = OpenParts()
    threading.excepthook = hide_write_errors
    # torch warns when peers end; the exit reporter says why they did
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with Watchdog(reporter, stop=stop if saves_checkpoints else None) as watchdog:
        watchdog.add_check(FrozenRanks(ranks).check)
        try:
            with watchdog.interruptible():
                end_with_torchrun(ranks)
                _run_to_the_end(
                    configuration, Supervision(ranks, progress, reporter, watchdog, stop, parts)
                )
                reporter.report_success()
        except BaseException as error:
            report_exception(error, reporter, watchdog)
        if reporter.exit_code != ExitCode.OK:
            exit_process(reporter, ranks, parts)
        watchdog.limit_shutdown(_CLOSE_SECONDS)
        close_after_success(parts)
    limit_exit(ExitCode.OK, _CLOSE_SECONDS)
    return ExitCode.OK


def _run_to_the_end(configuration: Configuration, supervision: Supervision) -> None:
    """Open the run and run the loop of this rank.

    The import of torch takes seconds. It comes here, after signals are handled, progress is
    reported and the data has been read.
    """
    require_reason_to_restart(configuration.run, os.environ)
    progress = supervision.progress
    # before torch can start NCCL
    os.environ.update(nccl_environment(os.environ, configuration.engine))
    data = _read_data(configuration, supervision) if supervision.ranks.rank == 0 else None
    progress.log("importing torch")
    with progress.task("importing torch"):
        from megatron_rl.run.open_run import open_run
    directory, loop = open_run(configuration, data, supervision)
    loop()
    if supervision.ranks.rank == 0:
        for line in closing_lines(directory.path):
            print_line(line)


def _read_data(configuration: Configuration, supervision: Supervision) -> RunData | Exception:
    """Read the data of the run.

    Returns an error where ranks run on other nodes: they learn of it after they have joined, and
    would otherwise wait for this rank until they time out. On a single node, torchrun ends them.
    """
    from megatron_rl.run.data import read_data

    is_single_node = int(os.environ.get("WORLD_SIZE", "1")) == supervision.ranks.count
    seconds = configuration.parallel.timeout_s
    # The other ranks wait no longer either
    failure = Failure(
        f"parallel.timeout_s={seconds:g}: reading the data takes longer. Raise it, or see whether "
        "data.source or reward.name names a class that hangs",
        ExitCode.BAD_DATA,
    )
    supervision.progress.log("reading the data")
    try:
        with (
            supervision.watchdog.time_limit(seconds, failure),
            supervision.progress.task("reading the data"),
        ):
            return read_data(configuration)
    except Exception as error:
        if is_single_node:
            raise
        return error
