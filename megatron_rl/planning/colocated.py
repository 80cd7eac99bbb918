"""Memory of a GPU on which a rank and a part of an engine take turns, from the settings alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.memory import BYTES, engine_memory, rank_memory, resting_bytes

GIB = 2**30
# Assumptions, because no GPU has run this: what a process holds beside its tensors. The trainer's
# has a CUDA context and NCCL's buffers.
_TRAINER_PROCESS_BYTES = 1.5 * GIB
# An engine that sleeps keeps the same, and workspaces of its kernels.
_ASLEEP_BYTES = 2.5 * GIB
# An engine that works also holds CUDA graphs and the activations of a prefill.
_WORKING_BYTES = 6 * GIB
# SGLang's own default is about this much of an empty GPU.
_MAX_FRACTION = 0.88
# Buckets that a sync holds beside the weights: the tensors of one, two copies as they travel, and
# the memory that the engine maps
_SYNC_BUCKETS = 4


@dataclass(frozen=True)
class ColocatedMemory:
    """Bytes on one GPU in both turns.

    training: the rank's peak. resting: what the rank keeps while the engine works. engine_weights,
    engine_sequence: the weights, and the KV cache of the longest sequence.
    """

    device: int
    training: int
    resting: int
    engine_weights: int
    engine_sequence: int

    @property
    def trainer_turn(self) -> int:
        """Bytes while the rank trains and the engine sleeps."""
        return math.ceil(self.training + _TRAINER_PROCESS_BYTES + _ASLEEP_BYTES)

    @property
    def engine_share(self) -> int:
        """Bytes for the engine's weights and KV cache while the rank rests; may be negative."""
        other_bytes = self.resting + _TRAINER_PROCESS_BYTES + _WORKING_BYTES
        return math.floor(min(self.device - other_bytes, _MAX_FRACTION * self.device))

    @property
    def fraction(self) -> float:
        """SGLang's `--mem-fraction-static`.

        SGLang takes it of the memory that is free when it starts, before the rank allocates any.
        """
        return math.floor(1000 * max(self.engine_share, 0) / self.device) / 1000

    def problems(self) -> Iterator[str]:
        """Yield what does not fit, with the numbers and remedies."""
        if self.trainer_turn > self.device:
            yield (
                f"while the rank trains, it needs {_gib(self.training)} GiB, its process "
                f"{_gib(_TRAINER_PROCESS_BYTES)} and the engine that sleeps {_gib(_ASLEEP_BYTES)}: "
                f"{_gib(self.trainer_turn)} of {_gib(self.device)} GiB. Use more ranks or "
                "parallel.ep, .pp, .tp, model.recompute=full or a smaller "
                "train.tokens_per_micro_batch"
            )
        minimum = self.engine_weights + self.engine_sequence
        if self.engine_share < minimum:
            yield (
                f"while the engine works, the rank keeps {_gib(self.resting)} GiB of weights, "
                f"gradients, optimizer state and buffers, which leaves "
                f"{_gib(max(self.engine_share, 0))} of {_gib(self.device)} GiB for the engine. It "
                f"needs {_gib(self.engine_weights)} for weights and {_gib(self.engine_sequence)} "
                "for one sequence. Use more ranks or parallel.ep, .pp, .tp, raise engine.tp, or "
                "engine.colocated=false with GPUs for the engines alone"
            )

    def describe(self) -> str:
        """Describe both turns, for people."""
        return (
            f"training {_gib(self.trainer_turn)} with an engine that sleeps; resting "
            f"{_gib(self.resting)} and an engine with {_gib(self.engine_share)} for weights and "
            f"cache (--mem-fraction-static={self.fraction:g}), of {_gib(self.device)} GiB"
        )


def colocated_memory(
    c: Configuration, shape: ModelShape, *, world_size: int, device_bytes: int
) -> ColocatedMemory:
    """Estimate both turns on the GPU that needs most.

    c: sized for the longest responses. Raises ValueError if the layers cannot be split over the
    stages.
    """
    stages = range(c.parallel.pp)
    engine = engine_memory(c, shape)
    one_request = replace(c, engine=replace(c.engine, max_running_requests=1))
    table = shape.vocab_size * shape.hidden_size * BYTES[c.engine.dtype]
    buckets = _SYNC_BUCKETS * max(int(c.sync.bucket_mb * 2**20), table)
    return ColocatedMemory(
        device=device_bytes,
        training=max(
            rank_memory(c, shape, world_size=world_size, stage=stage).total for stage in stages
        ),
        resting=max(
            resting_bytes(c, shape, world_size=world_size, stage=stage, buckets=buckets)
            for stage in stages
        ),
        engine_weights=engine.parameters,
        engine_sequence=engine_memory(one_request, shape).kv_cache,
    )


def require_memory(memory: ColocatedMemory) -> float:
    """Return the engine's `--mem-fraction-static`. Raises `Failure` if something misfits."""
    problems = list(memory.problems())
    if problems:
        raise Failure(f"engine.colocated=true: {'; '.join(problems)}", ExitCode.REFUSED)
    return memory.fraction


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
