"""Exit codes of every launch script, and the base of the exceptions that carry them.

Under torchrun these are the exit codes of the ranks. torchrun itself reports the rank that failed
first and exits with 1.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Causes of a run's end. Python itself exits with 1 after an unexpected exception."""

    OK = 0
    # The configuration or the run directory is refused and nothing was started, or a plugin failed.
    REFUSED = 2
    # Prompts or a checkpoint cannot be read.
    BAD_DATA = 3
    # An engine or a collector never became healthy, died or lost too many requests.
    ENGINE_FAILED = 4
    # Loss or gradients had NaN or Inf for three consecutive steps, or a guard
    # (guard.*) stopped the run.
    NON_FINITE = 5
    # An engine has other weights than the trainer sent, or routes were not replayed as recorded.
    SYNC_MISMATCH = 6
    # Another rank failed, or a collective timed out.
    PEER_FAILED = 7
    # A file of the run cannot be written: the disk is full, over quota or read-only.
    CANNOT_WRITE = 8
    # The run was stopped on request after saving a checkpoint. Resume with run.resume=auto.
    REQUEUE = 75
    # SIGHUP, such as a closed terminal. This and the next two are 128 + the signal's number.
    HUNG_UP = 129
    INTERRUPTED = 130  # SIGINT, such as Ctrl-C
    TERMINATED = 143  # SIGTERM, or the launcher of the ranks was killed


class Failure(Exception):
    """Expected error that ends a run.

    Its text is for people, and `exit_code` is for scripts. A class of its own is for failures that
    some code catches.
    """

    exit_code: int = 1

    def __init__(self, text: str = "", exit_code: int | None = None) -> None:
        super().__init__(text)
        if exit_code is not None:
            self.exit_code = exit_code
