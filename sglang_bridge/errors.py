"""What can go wrong between the trainer and an engine."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import ClassVar


def how_it_ended(returncode: int) -> str:
    """A process's end in words.

    returncode: minus a signal's number, or 128 more than it, if a signal ended it.
    """
    number = -returncode if returncode < 0 else returncode - 128
    if number == signal.SIGKILL:
        return "SIGKILL: from outside, or by the kernel for want of memory (see dmesg)"
    return (
        signal.Signals(number).name if number in set(signal.Signals) else f"exit code {returncode}"
    )


class EngineError(Exception):
    """Base of every error this package raises about an engine."""

    exit_code: ClassVar[int] = 4  # what a program that ends because of it exits with


class EngineUnhealthy(EngineError):
    """An engine did not become healthy before its deadline. log_tail: the last lines of its log."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(_with_log(message, log_tail))
        self.log_tail = log_tail


class EngineDied(EngineError):
    """An engine's process ended by itself. returncode: as of `how_it_ended`."""

    def __init__(self, message: str, *, returncode: int, log_tail: str = "") -> None:
        super().__init__(_with_log(f"{message} ({how_it_ended(returncode)})", log_tail))
        self.returncode = returncode
        self.log_tail = log_tail


class RequestFailed(EngineError):
    """A request got no usable answer: refused, out of retries or past its deadline. status: HTTP
    status if any.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WeightUpdateFailed(EngineError):
    """Some engines did not take new weights; they are left paused. failed: reason by URL; updated:
    URLs that did.
    """

    def __init__(
        self, version: int, failed: Mapping[str, str], updated: Sequence[str] = ()
    ) -> None:
        reasons = "; ".join(f"{url}: {reason}" for url, reason in failed.items())
        super().__init__(
            f"weights of version {version} did not reach {len(failed)} engine(s): {reasons}. "
            "These engines stay paused until a later push reaches them"
        )
        self.version = version
        self.failed = dict(failed)
        self.updated = tuple(updated)


class WeightMismatch(EngineError):
    """An engine holds other values than were sent.

    differences: a text for each of its parameters concerned.
    """

    exit_code = 6

    def __init__(self, url: str, version: int, differences: Sequence[str]) -> None:
        super().__init__(
            f"{url} does not hold the weights of version {version}: {len(differences)} parameter(s) differ: "
            f"{_abridged(differences, '; ')}. What it generates must not be trained on: send the weights again"
        )
        self.url = url
        self.version = version
        self.differences = tuple(differences)


class AuditUnsupported(EngineError):
    """An engine holds parameters of the right names whose values cannot be compared: the message
    says why.
    """


def _with_log(message: str, log_tail: str) -> str:
    return f"{message}; last lines of its log:\n{log_tail}" if log_tail else message


def _abridged(texts: Sequence[str], separator: str, most: int = 8) -> str:
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return separator.join([*texts[:most], *more])
