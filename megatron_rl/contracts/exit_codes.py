"""Exit codes of every launch script, and the exceptions that carry them.

Under torchrun they are the codes of the ranks: torchrun reports the rank that knew the cause first,
and exits with 1.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What ended a run. 1 is left to Python: an exception that nobody foresaw."""

    OK = 0
    # the configuration or the run directory, before anything starts; or a class of the user's own
    # failed
    REFUSED = 2
    BAD_DATA = 3  # prompts or a checkpoint that cannot be read
    ENGINE_FAILED = (
        4  # an engine or a collector never became healthy, died or lost too many requests
    )
    NON_FINITE = 5  # NaN or Inf in loss or gradients for train.max_nonfinite_steps steps in a row
    # an engine holds other weights than the trainer sent, or routes were not replayed as recorded
    SYNC_MISMATCH = 6
    PEER_FAILED = 7  # another rank failed or a collective timed out
    CANNOT_WRITE = (
        8  # a file of the run cannot be written: the disk is full, over quota or read-only
    )
    # told to stop, and a checkpoint was saved before: start the same again with run.resume=auto
    REQUEUE = 75
    HUNG_UP = 129  # SIGHUP, such as a closed terminal; 128 + the signal's number
    INTERRUPTED = 130  # SIGINT, such as Ctrl-C
    TERMINATED = 143  # SIGTERM, or the launcher of the ranks was killed


class Failure(Exception):
    """Something foreseen that ends a run: its text is what a person reads, `exit_code` what a
    script reads.
    """

    exit_code: ClassVar[int] = 1
