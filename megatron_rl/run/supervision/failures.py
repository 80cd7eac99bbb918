"""Maps exceptions to exit codes and reasons."""

from __future__ import annotations

import sys

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.write_errors import write_problem
from sglang_bridge.errors import EngineError

_PEER_ERROR_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


def describe_failure(error: BaseException) -> tuple[ExitCode | None, str]:
    """Return the exit code of an exception, None for an unexpected one, and the reason."""
    text = str(error)
    if isinstance(error, Failure | EngineError):
        return ExitCode(error.exit_code), text or type(error).__name__
    problem = write_problem(error)
    if problem is not None:
        return ExitCode.CANNOT_WRITE, problem
    is_plain_error = _comes_from_peer(error)
    if is_plain_error or _comes_from_process_group(error):
        if "timed out" in text.lower() or "timeout" in text.lower():
            text = (
                "another rank did not answer within parallel.timeout_s: it hangs, is stopped or "
                f"is slow ({text})"
            )
        elif is_plain_error:
            text = f"another rank ended: {text}"
        return ExitCode.PEER_FAILED, text
    return None, f"{type(error).__name__}: {text}"


def log_tail_of(error: BaseException) -> str:
    """Return the last lines of the log of the process whose end the exception reports."""
    return str(getattr(error, "log_tail", ""))


def comes_from_engines(error: BaseException) -> bool:
    """True for an exception that the death of an engine or a collector may explain."""
    return isinstance(error, Failure | EngineError) and error.exit_code == ExitCode.ENGINE_FAILED


def _comes_from_peer(error: BaseException) -> bool:
    """True for a plain RuntimeError of gloo or NCCL."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_ERROR_WORDS)


def _comes_from_process_group(error: BaseException) -> bool:
    """True for errors of torch's process groups. Bad data is reported before torch is imported."""
    torch_distributed = sys.modules.get("torch.distributed")
    return torch_distributed is not None and isinstance(error, torch_distributed.DistError)
