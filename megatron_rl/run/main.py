"""One run from its configuration to its exit code."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.progress import Progress
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.shutdown import close, explain, leave, leave_thread
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.run.supervision.watchdog import Watchdog, end_with_torchrun
from sglang_bridge.server.command import nccl_environment

if TYPE_CHECKING:
    from megatron_rl.run.rank import Rank

_CLOSE_SECONDS = 30.0  # of a run that is complete
_FOLLOW_SECONDS = 5.0  # the other ranks end after rank 0, which saves


def run(configuration: Configuration) -> int:
    """Train.

    Returns `ExitCode.OK`; with any other code the process ends here, in a few seconds and with its
    reason.
    """
    siblings = LocalRanks.of(os.environ)
    words = ExitReporter(siblings)
    talks = configuration.logger.progress and siblings.rank == 0
    progress = Progress(configuration.train.total_steps, enabled=talks)
    threading.excepthook = leave_thread
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # what it warns of when peers end is said in better words
    limit = configuration.run.stop_within_s + (_FOLLOW_SECONDS if siblings.rank else 0.0)
    stop = StopRequest(limit) if configuration.run.checkpoint_every else None
    with Watchdog(words, stop=stop) as watch:
        rank = None
        try:
            with watch.interruptible():
                end_with_torchrun(siblings)
                rank = _open(configuration, progress, words, watch, stop, leads=siblings.rank == 0)
                rank.run()
                words.complete()
        except BaseException as error:
            explain(error, words, watch)
        if rank is None or words.code != ExitCode.OK:
            leave(words, siblings, rank)
        watch.allow(_CLOSE_SECONDS)
        close(rank)
    return ExitCode.OK


def _open(
    configuration: Configuration,
    progress: Progress,
    words: ExitReporter,
    watch: Watchdog,
    stop: StopRequest | None,
    *,
    leads: bool,
) -> Rank:
    """The import of torch is late and long: signals and progress come first. leads: rank 0 looks at
    users' classes.
    """
    os.environ.update(nccl_environment(os.environ))  # before torch could start NCCL
    progress.say("importing torch")
    with progress.during("importing torch"):
        from megatron_rl.run.rank import Rank
    if leads:
        from megatron_rl.run.user_classes import named, require_user_classes

        with progress.during(f"opening {', '.join(named(configuration))}"):
            require_user_classes(configuration)
    return Rank(configuration, progress, words, watch, stop)
