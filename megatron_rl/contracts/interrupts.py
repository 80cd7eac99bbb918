"""Ctrl-C while a script is still importing: it ends without a traceback."""

from __future__ import annotations

import os
import signal

from megatron_rl.contracts.exit_codes import ExitCode


def exit_on_interrupt() -> None:
    """From now on, until a run listens for itself.

    A process that was told to ignore Ctrl-C goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(ExitCode.INTERRUPTED))
