"""From an exception to the exit code and the sentence a person reads.

Invariant: every failure this project raises on purpose has a documented code; None means nobody foresaw it, and it is
raised on with its traceback.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl.evaluation import LostEvaluation
from megatron_rl.exit_codes import ExitCode
from megatron_rl.follower import RunAborted
from megatron_rl.mcore.hf_config import ModelConfigError
from megatron_rl.mcore.hf_weights.load import CheckpointError
from megatron_rl.node_services import CollectorDied
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.rollout.hub import CollectorLost
from megatron_rl.rollout.payload_store import PayloadGone
from megatron_rl.rollout.producer import ProducerFailed
from megatron_rl.rollout_stage import NothingCameBack
from megatron_rl.tokenizer import TokenizerError
from megatron_rl.training_loop import NonFiniteRun
from megatron_rl.watching.run_directory import RunDirectoryUnusable
from sglang_bridge.errors import EngineError, WeightMismatch

_CODES: tuple[tuple[tuple[type[BaseException], ...], ExitCode], ...] = (
    ((RunDirectoryUnusable,), ExitCode.REFUSED),
    ((PromptDataError, CheckpointError, ModelConfigError, TokenizerError), ExitCode.BAD_DATA),
    ((WeightMismatch,), ExitCode.SYNC_MISMATCH),
    (
        (EngineError, CollectorDied, CollectorLost, ProducerFailed, NothingCameBack, LostEvaluation, PayloadGone),
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
