"""Exit without a traceback on Ctrl-C while a script is still importing."""

from __future__ import annotations

import os
import signal

from megatron_rl.contracts.exit_codes import ExitCode


def exit_on_interrupt() -> None:
    """Exit at once on SIGINT, until the run installs its own handler.

    Does nothing in a process that already ignores or handles SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(ExitCode.INTERRUPTED))
