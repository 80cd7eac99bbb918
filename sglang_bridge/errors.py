"""What can go wrong between the trainer and an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class EngineError(Exception):
    """Base of every error this package raises about an engine."""


class EngineUnhealthy(EngineError):
    """An engine did not become healthy before its deadline. log_tail: the last lines of its log."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(_with_log(message, log_tail))
        self.log_tail = log_tail


class EngineDied(EngineError):
    """An engine's process ended by itself. exit_code: 128 + signal number if a signal ended it."""

    def __init__(self, message: str, *, exit_code: int, log_tail: str = "") -> None:
        super().__init__(_with_log(f"{message} (exit code {exit_code})", log_tail))
        self.exit_code = exit_code
        self.log_tail = log_tail


class RequestFailed(EngineError):
    """A request got no usable answer: refused, out of retries or past its deadline. status: HTTP status if any."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WeightUpdateFailed(EngineError):
    """Some engines did not take new weights; they are left paused. failed: reason by URL; updated: URLs that did."""

    def __init__(self, version: int, failed: Mapping[str, str], updated: Sequence[str] = ()) -> None:
        reasons = "; ".join(f"{url}: {reason}" for url, reason in failed.items())
        super().__init__(
            f"weights of version {version} did not reach {len(failed)} engine(s): {reasons}. "
            "These engines stay paused: push again, or restart them and replace their handles"
        )
        self.version = version
        self.failed = dict(failed)
        self.updated = tuple(updated)


class WeightMismatch(EngineError):
    """An engine holds other values than were sent. tensors: the names concerned."""

    def __init__(self, url: str, version: int, tensors: Sequence[str]) -> None:
        super().__init__(
            f"{url} does not hold the weights of version {version}: {len(tensors)} tensor(s) differ: "
            f"{', '.join(tensors)}. Its samples must not be trained on: send the weights again"
        )
        self.url = url
        self.version = version
        self.tensors = tuple(tensors)


class AuditUnsupported(EngineError):
    """An engine's weights cannot be compared by value: the message says why."""


def _with_log(message: str, log_tail: str) -> str:
    return f"{message}; last lines of its log:\n{log_tail}" if log_tail else message
