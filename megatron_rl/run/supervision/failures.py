"""Maps exceptions to exit codes and reasons."""

from __future__ import annotations

import torch.distributed as dist

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
    if isinstance(error, dist.DistError):
        return ExitCode.PEER_FAILED, text
    if isinstance(error, RuntimeError) and any(word in text.lower() for word in _PEER_ERROR_WORDS):
        return ExitCode.PEER_FAILED, f"another rank ended: {text}"
    return None, f"{type(error).__name__}: {text}"


def comes_from_engines(error: BaseException) -> bool:
    """True for an exception that the death of an engine or a collector may explain."""
    return isinstance(error, Failure | EngineError) and error.exit_code == ExitCode.ENGINE_FAILED
