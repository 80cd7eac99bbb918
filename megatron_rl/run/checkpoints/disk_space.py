"""Computes the disk space that a run may need, and requires it before the run starts."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_rl.config.curriculum import sized_for_all_phases
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.parameter_count import num_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.memory import BYTES
from megatron_rl.records.write_errors import free_bytes
from megatron_rl.rollouts.steps.steps_ahead import largest_age
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of

_MIB = 2**20
# Metrics, logs and TensorBoard
_RECORDS_BYTES = 32 * _MIB
_MODES_THAT_TRAIN = ("train", "train_only")
# One int32 id and one float32 log-probability
_TOKEN_BYTES = 8
_MAX_UINT8_EXPERTS = 256


def checkpoint_bytes(c: Configuration, shape: ModelShape) -> int:
    """The size of one checkpoint: the weights, and three float32 numbers for each parameter.

    These are the optimizer's copy of the weight and its two moments. Left out are the rollouts of
    later steps, whose number is known when they are saved.
    """
    return num_parameters(shape) * (BYTES[c.model.dtype] + 3 * BYTES["float32"])


def required_bytes(
    c: Configuration, shape: ModelShape, *, reusable_checkpoints: int = 0, steps_done: int = 0
) -> dict[str, int]:
    """The largest number of bytes that a run writes and keeps at one time, by configuration key.

    reusable_checkpoints: the checkpoints on the disk that a resumed run will replace.
    steps_done: the steps before a resumed run begins.
    """
    parameters = num_parameters(shape)
    sizes = {"run.root (metrics and logs)": _RECORDS_BYTES}
    if c.mode in _MODES_THAT_TRAIN:
        if c.run.save_weights:
            # Twice: existing weights are replaced once the new ones are complete
            weight_bytes = parameters * BYTES[c.model.dtype]
            sizes["run.save_weights=true"] = 2 * weight_bytes
        if c.run.checkpoint_every:
            sizes |= _checkpoint_sizes(c, shape, reusable_checkpoints)
        if c.logger.save_rollouts_every:
            every = c.logger.save_rollouts_every
            num_saved = max(0, c.train.total_steps // every - steps_done // every)
            largest = sized_for_all_phases(c)
            sizes["logger.save_rollouts_every"] = num_saved * _batch_bytes(largest, shape)
    if c.mode == "rollout_only":
        sizes["mode=rollout_only"] = _recording_bytes(c, shape)
    transport = c.sync.transport
    if transport in ("disk", "delta") and sends_weights(c):
        # A node whose copy cannot take a change gets complete weights beside it
        pushes = 2 if transport == "delta" else 1
        sizes[f"sync.transport={transport}"] = pushes * parameters * BYTES[c.engine.dtype]
    return sizes


def require_disk_space(c: Configuration, shape: ModelShape, checkpoint: Path | None = None) -> None:
    """Raise `Failure` when the disk of run.root has too little free space.

    checkpoint: the checkpoint that the run resumes from.
    """
    root = Path(c.run.root).expanduser().resolve()
    free = free_bytes(root)
    reusable = _reusable_checkpoints(c, checkpoint)
    steps_done = 0 if checkpoint is None else step_of(checkpoint) or 0
    sizes = required_bytes(c, shape, reusable_checkpoints=reusable, steps_done=steps_done)
    if free >= sum(sizes.values()):
        return
    parts = ", ".join(f"{size / _MIB:,.0f} MiB for {key}" for key, size in sizes.items())
    raise Failure(
        f"run.root={c.run.root!r}: its disk has {free / _MIB:,.0f} MiB of free space, and the run "
        f"may need {parts}. Free some space, choose another run.root, or {_remedy(c)}",
        ExitCode.CANNOT_WRITE,
    )


def sends_weights(c: Configuration) -> bool:
    """True when the run sends weights to engines: a measurement of model.path sends none."""
    if c.is_measurement:
        return c.run.resume != "never"
    return c.has_engines


def _recording_bytes(c: Configuration, shape: ModelShape) -> int:
    """The size of all recordings of mode=rollout_only, with stopped and surplus groups."""
    return c.train.total_steps * _batch_bytes(c, shape, budget=_sampling_budget(c))


def _checkpoint_sizes(c: Configuration, shape: ModelShape, num_reusable: int) -> dict[str, int]:
    """The sizes of all new checkpoints, by configuration key.

    num_reusable: the checkpoints on the disk that new ones replace.
    """
    # The oldest checkpoint is removed once the new one is complete
    num_kept = c.run.keep_checkpoints + (c.run.keep_best is not None)
    num_new = max(1, num_kept + 1 - num_reusable)
    sizes = {"run.checkpoint_every": num_new * checkpoint_bytes(c, shape)}
    rollout_bytes = _rollouts_ahead_bytes(c, shape)
    if rollout_bytes:
        sizes["rollout.max_staleness"] = num_new * rollout_bytes
    return sizes


def _sampling_budget(c: Configuration) -> float:
    """Rollouts that a step samples for each one that it trains, at most."""
    return 1.0 if c.selection.name == "uniform" else c.selection.budget


def _rollouts_ahead_bytes(c: Configuration, shape: ModelShape) -> int:
    """The size of the rollouts of later steps in a checkpoint, with stopped and surplus groups."""
    rollout = c.rollout
    num_steps = largest_age(rollout.max_staleness, continues_responses=rollout.on_update != "wait")
    if c.mode != "train" or not num_steps:
        return 0
    return num_steps * _batch_bytes(sized_for_all_phases(c), shape, budget=_sampling_budget(c))


def _batch_bytes(c: Configuration, shape: ModelShape, *, budget: float = 1.0) -> int:
    """The size of a step's rollouts in a file, if every response is as long as possible.

    budget: rollouts for each one of rollout.prompts_per_step and rollout.samples_per_prompt.
    """
    rollouts = math.ceil(c.rollout.prompts_per_step * c.rollout.samples_per_prompt * budget)
    tokens = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    token_bytes = _TOKEN_BYTES
    if c.train.replay == "rollout":
        route_bytes = 1 if shape.num_experts <= _MAX_UINT8_EXPERTS else 2
        token_bytes += len(shape.moe_layers) * shape.topk * route_bytes
    return rollouts * tokens * token_bytes


def _reusable_checkpoints(c: Configuration, checkpoint: Path | None) -> int:
    """The number of checkpoints that a resumed run keeps until newer ones replace them."""
    if checkpoint is None or c.run.resume != "auto":
        return 0
    checkpoints = CheckpointStore(checkpoint.parent).checkpoints()
    return sum(path.name <= checkpoint.name for path in checkpoints)


def _remedy(c: Configuration) -> str:
    if c.mode == "rollout_only":
        return "lower train.total_steps"
    if c.is_measurement:
        return "use sync.transport=distributed"
    if c.logger.save_rollouts_every:
        return "raise logger.save_rollouts_every"
    if c.run.checkpoint_every and c.rollout.max_staleness:
        return "lower run.keep_checkpoints or rollout.max_staleness"
    return "set run.save_weights=false"
