"""From an exception to the exit code and the sentence a person reads."""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.mcore.weights.load import CheckpointError
from megatron_rl.models.qwen3_moe import ModelConfigError
from megatron_rl.models.tokenizer import TokenizerError
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.records.run_directory import RunDirectoryUnusable
from megatron_rl.rollouts.batch import NothingCameBack
from megatron_rl.rollouts.evaluation import LostEvaluation
from megatron_rl.rollouts.hub import CollectorLost
from megatron_rl.rollouts.queue import CollectorFailed
from megatron_rl.rollouts.store import RolloutGone
from megatron_rl.run.follower import RunAborted
from megatron_rl.run.loop import NonFiniteRun
from megatron_rl.run.services import CollectorDied
from sglang_bridge.errors import EngineError, WeightMismatch

_CODES: tuple[tuple[tuple[type[BaseException], ...], ExitCode], ...] = (
    ((RunDirectoryUnusable,), ExitCode.REFUSED),
    ((PromptDataError, CheckpointError, ModelConfigError, TokenizerError), ExitCode.BAD_DATA),
    ((WeightMismatch,), ExitCode.SYNC_MISMATCH),
    (
        (EngineError, CollectorDied, CollectorLost, CollectorFailed, NothingCameBack, LostEvaluation, RolloutGone),
        ExitCode.ENGINE_FAILED,
    ),
    ((NonFiniteRun,), ExitCode.NON_FINITE),
    ((RunAborted, dist.DistError), ExitCode.PEER_FAILED),
    ((KeyboardInterrupt,), ExitCode.INTERRUPTED),
)
_PEER_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class Terminated(BaseException):
    """SIGTERM arrived."""


def describe_failure(error: BaseException) -> tuple[ExitCode | None, str]:
    """The code of an exception, None if it is not one of ours, and its reason."""
    if isinstance(error, Terminated):
        return ExitCode.TERMINATED, "the run was told to stop (SIGTERM)"
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code, str(error) or type(error).__name__
    if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _PEER_WORDS):
        return ExitCode.PEER_FAILED, f"another rank is gone: {error}"
    return None, f"{type(error).__name__}: {error}"
