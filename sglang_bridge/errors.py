"""Errors between the trainer and an engine."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

_MAX_DIFFERENCES = 8  # in a message


def describe_exit(returncode: int) -> str:
    """Describe how a process ended.

    returncode: if a signal ended the process, minus the signal's number or 128 more than it.
    """
    number = -returncode if returncode < 0 else returncode - 128
    if number == signal.SIGKILL:
        return "SIGKILL: from outside, or by the kernel for want of memory (see dmesg)"
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"exit code {returncode}"


class EngineError(Exception):
    """An engine that cannot be used, and the base of the other errors of this package.

    exit_code: the exit code of a program that ends because of the error. log_tail: the last lines
    of the engine's log.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail
        if log_tail:  # in a traceback, but not in the message
            self.add_note(f"last lines of the log:\n{log_tail}")


class EngineDied(EngineError):
    """The process of an engine, or of a collector, ended by itself.

    returncode: as in `describe_exit`. log_path: its log. log_tail: the last lines of it.
    """

    def __init__(
        self, message: str, *, returncode: int, log_path: Path | None = None, log_tail: str = ""
    ) -> None:
        location = "" if log_path is None else f"; see {log_path}"
        text = f"{message} ({describe_exit(returncode)}){location}"
        super().__init__(text, log_tail=log_tail)
        self.returncode = returncode


class RequestFailed(EngineError):
    """A request got no usable answer: refused, out of retries or past its deadline.

    status: the HTTP status, if there was one.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WeightUpdateFailed(EngineError):
    """Some engines did not take new weights. They stay paused.

    failures: the reason by URL. updated_urls: the engines that took the weights.
    """

    def __init__(
        self, version: int, failures: Mapping[str, str], updated_urls: Sequence[str] = ()
    ) -> None:
        reasons = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
        super().__init__(
            f"weights of version {version} did not reach {len(failures)} engine(s): {reasons}. "
            "These engines stay paused until a later push reaches them"
        )
        self.version = version
        self.failures = dict(failures)
        self.updated_urls = tuple(updated_urls)


class WeightMismatch(EngineError):
    """An engine holds other values than were sent.

    differences: a text for each parameter that differs.
    """

    exit_code = 6

    def __init__(self, url: str, version: int, differences: Sequence[str]) -> None:
        count = len(differences)
        super().__init__(
            f"{url} does not hold the weights of version {version}: {count} parameter(s) differ: "
            f"{_abridge(differences)}. Do not train on what it generates: send the weights again"
        )
        self.url = url
        self.version = version
        self.differences = tuple(differences)


class AuditUnsupported(EngineError):
    """An engine's parameters have the correct names, but their values cannot be compared.

    The message gives the reason.
    """


def _abridge(texts: Sequence[str]) -> str:
    more = len(texts) - _MAX_DIFFERENCES
    suffix = [f"and {more} more"] if more > 0 else []
    return "; ".join([*texts[:_MAX_DIFFERENCES], *suffix])
