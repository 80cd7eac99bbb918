"""Export of a training checkpoint to Hugging Face format.

It uses no GPU. A rank holds one bucket of weights at a time, and several ranks share the work.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import RunState
from megatron_rl.models.families import read_shape
from megatron_rl.models.fp8_weights import (
    BLOCK,
    fp8_weights,
    quantization_config,
    undivided_parts,
)
from megatron_rl.models.hf_checkpoint.inspection import inspect_checkpoint
from megatron_rl.models.shape import ModelShape
from megatron_rl.records.progress import Progress
from megatron_rl.records.write_errors import free_bytes
from megatron_rl.run.checkpoints.state_file import read_state

if TYPE_CHECKING:
    from megatron_rl.mcore.job import Job

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIB = 2**20


class ExportRefused(Failure):
    """The options cannot be met. Nothing was written."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class ExportRequest:
    """Options of an export.

    source: directory of a run, or of one checkpoint.
    out: directory to create.
    dtype: data type of the result. None takes the training data type.
    fp8: write what an engine with engine.quantization=fp8 loads. The other tensors then have
    `dtype`.
    unquantized_first, unquantized_last: with fp8, the layers at either end that stay in `dtype`.
    model: start checkpoint. None takes `model.path` of the run.
    bucket_mib: weights that a rank holds at a time, in MiB.
    """

    source: Path
    out: Path
    dtype: str | None = None
    fp8: bool = False
    unquantized_first: int = 0
    unquantized_last: int = 0
    model: Path | None = None
    bucket_mib: float = 1024.0


@dataclass(frozen=True)
class ExportPlan:
    """The checkpoint to export.

    model: the start checkpoint and the training data type.
    dtype: data type of the result.
    step: last step of the checkpoint.
    """

    checkpoint: Path
    model: ModelSettings
    dtype: str
    step: int


def check_request(request: ExportRequest) -> None:
    """Raise `ExportRefused` for options that cannot be met. This needs no torch."""
    if not request.source.expanduser().is_dir():
        raise ExportRefused(
            f"{request.source}: there is no such directory. Give the directory of a run or of one "
            "checkpoint"
        )
    if request.out.exists():
        raise ExportRefused(
            f"--out={request.out}: this path exists already. Give a directory that does not exist"
        )
    if not 0 < request.bucket_mib < float("inf"):
        raise ExportRefused(
            f"--bucket-mib={request.bucket_mib:g}: it must be above 0 and finite. Give the MiB of "
            "weights that a rank may hold at a time"
        )
    layers = {
        "--unquantized-first": request.unquantized_first,
        "--unquantized-last": request.unquantized_last,
    }
    for option, number in layers.items():
        if number < 0 or (number and not request.fp8):
            raise ExportRefused(
                f"{option}={number}: it takes a number of layers, at least 0, and belongs to "
                "--fp8. Add --fp8, or leave it out"
            )


def export_checkpoint(request: ExportRequest) -> None:
    """Export a checkpoint. Collective of the ranks that torchrun started, or one process alone.

    Raises `ExportRefused`, and `Failure` for NaN and Inf, too.
    """
    check_request(request)
    # The host has more memory than a GPU, and nothing is computed.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_rl.mcore import compat
    from megatron_rl.mcore.job import join, leave

    job = join(ParallelSettings())
    progress = Progress(0, is_enabled=job.rank == 0)
    try:
        plan = plan_export(request, job, progress)
        with progress.task("importing Megatron"):
            compat.install()
            from megatron_rl.mcore import parallel
        parallel.initialize(ParallelSettings(), seed=0, job=job)
        progress.log(
            f"exporting {plan.checkpoint} after step {plan.step} as {_format(plan, request)}"
        )
        with progress.task("exporting"):
            _write(plan, request)
        progress.log(f"done: {request.out}")
    finally:
        leave()


def _format(plan: ExportPlan, request: ExportRequest) -> str:
    return f"FP8 and {plan.dtype}" if request.fp8 else plan.dtype


def plan_export(request: ExportRequest, job: Job, progress: Progress) -> ExportPlan:
    """Choose the newest complete checkpoint and find its model. Collective.

    Raises `Failure` and `ExportRefused`.
    """
    from megatron_rl.run.checkpoints.resume import checkpoints_at, newest_complete

    with progress.task("comparing the files with their hashes"):
        checkpoint, damages = newest_complete(checkpoints_at(request.source), job)
    if checkpoint is None:
        reasons = " | ".join(damages) or "no checkpoint was found"
        raise Failure(
            f"{request.source} holds no complete checkpoint ({reasons}). Give another directory",
            ExitCode.BAD_DATA,
        )
    for damage in damages:
        progress.log(f"warning: skipping a damaged checkpoint: {damage}")
    state = read_state(checkpoint)
    model = find_model(state, request.model)
    _require_blocks(request, read_shape(model.path))
    dtype = request.dtype or model.dtype
    _require_space(request.out, model, dtype)
    return ExportPlan(checkpoint, model, dtype, state.step)


def find_model(state: RunState, override: Path | None) -> ModelSettings:
    """Return the start checkpoint, whose configuration and tokenizer the result gets.

    override: another location of the start checkpoint. Raises `ExportRefused`.
    """
    if override is None:
        path = str(state.settings.get("model.path", ""))
        key = f"model.path={path!r} in the settings of the checkpoint"
        remedy = ". If it has moved, give its new location: --model=PATH"
    else:
        path = str(override)
        key = f"--model={override}"
        remedy = ""
    _, defects = inspect_checkpoint(path, weights=False)
    if defects:
        reasons = "; ".join(f"{defect.rule}. {defect.remedy}" for defect in defects)
        raise ExportRefused(f"{key}: {reasons}{remedy}")
    return ModelSettings(path=path, dtype=state.settings.get("model.dtype", "float32"))


def _require_blocks(request: ExportRequest, shape: ModelShape) -> None:
    """Raise `ExportRefused` for a model that no engine would load in FP8."""
    if not request.fp8:
        return
    parts = [f"{part}={size}" for part, size in undivided_parts(shape, tp=1, ep=1)]
    if parts:
        raise ExportRefused(
            f"--fp8: a scale belongs to {BLOCK} x {BLOCK} weights, and {', '.join(parts)} of the "
            f"model is no multiple of {BLOCK}. Export without --fp8"
        )
    num_unquantized = request.unquantized_first + request.unquantized_last
    if num_unquantized >= shape.num_layers:
        raise ExportRefused(
            f"--unquantized-first={request.unquantized_first} and "
            f"--unquantized-last={request.unquantized_last}: all of the model's {shape.num_layers} "
            "layers would stay unquantized. Give fewer, or export without --fp8"
        )


def _require_space(out: Path, model: ModelSettings, dtype: str) -> None:
    """Raise `ExportRefused` when the result would not fit on its disk."""
    from megatron_rl.models.parameter_count import num_parameters

    size = num_parameters(read_shape(model.path)) * BYTES_PER_VALUE[dtype]
    free = free_bytes(out)
    if free < size:
        raise ExportRefused(
            f"--out={out}: {free / _MIB:,.0f} MiB are free on this disk, and the result takes "
            f"{size / _MIB:,.0f} MiB. Free some space, or give another directory"
        )


def _write(plan: ExportPlan, request: ExportRequest) -> None:
    """Write the result. Collective.

    Raises `Failure`, also for NaN and Inf.
    """
    import torch

    from megatron_rl.mcore.checkpoint import SavedWeights, write_hf

    shape = read_shape(plan.model.path)
    bucket_bytes = int(request.bucket_mib * _MIB)
    dtype: Any = getattr(torch, plan.dtype)
    try:
        weights = SavedWeights(plan.checkpoint, shape, plan.model, bucket_bytes=bucket_bytes)
        names = quantization = None
        if request.fp8:
            layers = {
                "unquantized_first": request.unquantized_first,
                "unquantized_last": request.unquantized_last,
            }
            names = fp8_weights(shape, **layers)
            quantization = quantization_config(shape, **layers)
        write_hf(
            weights,
            request.out,
            source=Path(plan.model.path),
            dtype=dtype,
            names=names,
            quantization=quantization,
        )
    except ValueError as error:
        raise Failure(
            f"{error}. {plan.model.path} is not the model that it was trained from. Give that "
            "model: --model=PATH",
            ExitCode.BAD_DATA,
        ) from error
