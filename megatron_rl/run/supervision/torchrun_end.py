"""The end of torchrun after a failed run: one line in place of its traceback.

torchrun imports this module through the entry point `torchrun.handlers` of the installed package.
The ranks have said why the run ended, and torchrun's 30 lines would hide it. `LOGLEVEL=INFO` in the
environment keeps them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# Of this project: other programs that torchrun starts in this environment keep its traceback
_SCRIPTS = ("train_rl.py", "preflight.py")
_LOGGER = "torch.distributed.elastic.multiprocessing.api"
_FAILED = "ChildFailedError"
_STOPPED = "SignalException"


def install() -> Callable[..., NoReturn]:
    """Replace the traceback of a torchrun that starts a script of this project.

    Returns a factory of rendezvous handlers, which the entry point must give and nobody asks for.
    """
    is_ours = any(Path(argument).name in _SCRIPTS for argument in sys.argv[1:])
    if is_ours and "LOGLEVEL" not in os.environ:
        sys.excepthook = _report
        logging.getLogger(_LOGGER).addFilter(lambda record: record.levelno > logging.ERROR)
    return _open_rendezvous


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line for ranks that failed, nothing after a signal, else the traceback."""
    if kind.__name__ == _FAILED:
        print(describe_failure(error), file=sys.stderr, flush=True)
    elif kind.__name__ != _STOPPED:
        sys.__excepthook__(kind, error, trace)


def describe_failure(error: Any) -> str:
    """Return the line for a `ChildFailedError`: the rank that ended first, and how."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    end = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return f"torchrun: rank {rank} ended first, with {end}"


def _open_rendezvous(*_: object) -> NoReturn:
    raise NotImplementedError("espo_megatron_rl is no rendezvous backend; use c10d or static")
