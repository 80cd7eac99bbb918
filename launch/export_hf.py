"""Writes the model of a training checkpoint in Hugging Face format, for transformers and SGLang.

    python launch/export_hf.py runs/NAME --out DIR
    torchrun --nproc-per-node 4 launch/export_hf.py runs/NAME/checkpoints/iter_0000010 --out DIR --dtype bfloat16

CHECKPOINT is a run's directory, of which the newest whole checkpoint is taken, or one checkpoint,
in whatever layout it was saved. No GPU is used. A rank holds one bucket of weights at a time;
several ranks share the work. All files are compared with their hashes first. Configuration and
tokenizer are those of the start checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import RunState
from megatron_rl.models.checkpoint_inspection import inspect_checkpoint
from megatron_rl.models.families import read_shape
from megatron_rl.records.progress import Progress
from megatron_rl.records.write_errors import free_bytes, write_problem
from megatron_rl.run.checkpoints.state_file import read_state

if TYPE_CHECKING:
    from megatron_rl.mcore.job import Job

DTYPES = ("float32", "bfloat16", "float16")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 2**20


class ExportRefused(Failure):
    """The command asks for what cannot be; nothing was written."""

    exit_code = ExitCode.REFUSED


class BadCheckpoint(Failure):
    """The checkpoint is damaged, or of another model than its settings say."""

    exit_code = ExitCode.BAD_DATA


@dataclass(frozen=True)
class Plan:
    """What will be written. model: the start checkpoint, with the dtype that was trained in."""

    checkpoint: Path
    model: ModelSettings
    dtype: str
    step: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Export and return the exit code."""
    options = parse(arguments)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        require_options(options)
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # torchrun's, when another rank failed
        export(options)
    except Failure as refused:
        if (
            not isinstance(refused, ExportRefused) or os.environ.get("LOCAL_RANK", "0") == "0"
        ):  # the same on all
            print(refused, file=sys.stderr)
        return refused.exit_code
    except KeyboardInterrupt:
        print(f"interrupted: {options.out} was not written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except (
        Exception
    ) as error:  # safetensors has its own for a full disk, torch plain ones for a rank that ended
        problem = write_problem(error, options.out, key="--out")
        if problem is not None or isinstance(error, OSError):
            print(problem or f"--out={options.out}: {error}", file=sys.stderr)
            return ExitCode.CANNOT_WRITE
        if not (several and isinstance(error, RuntimeError)):
            raise
        print(
            f"another rank ended, and says why: {options.out} was not written ({error})",
            file=sys.stderr,
        )
        return ExitCode.PEER_FAILED
    return ExitCode.OK


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a run's directory, or one checkpoint"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a directory that does not exist yet"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the result; what was trained in when not given"
    )
    parser.add_argument(
        "--model", type=Path, help="the start checkpoint, where model.path of the run has moved"
    )
    parser.add_argument(
        "--bucket-mib",
        type=float,
        default=1024.0,
        help="weights a rank holds at a time (default 1024)",
    )
    return parser.parse_args(arguments)


def require_options(options: argparse.Namespace) -> None:
    """Raises `ExportRefused` before torch is imported."""
    if not options.checkpoint.expanduser().is_dir():
        raise ExportRefused(
            f"{options.checkpoint}: there is no such directory. Give a run's, or one checkpoint's"
        )
    if options.out.exists():
        raise ExportRefused(f"--out={options.out}: it exists. Give a directory that does not")
    if not 0 < options.bucket_mib < float("inf"):
        raise ExportRefused(f"--bucket-mib={options.bucket_mib:g}: it must be above 0, and finite")


def export(options: argparse.Namespace) -> None:
    """A collective of the ranks that torchrun started, or one process alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # nothing is computed, and a GPU has less room than its host
    )
    from megatron_rl.mcore import compat
    from megatron_rl.mcore.job import join, leave

    job = join(ParallelSettings())
    progress = Progress(0, enabled=job.rank == 0)
    try:
        plan = make_plan(options, job, progress)
        with progress.task("importing Megatron"):
            compat.install()
            from megatron_rl.mcore import parallel
        parallel.initialize(ParallelSettings(), seed=0, job=job)
        progress.log(f"exporting {plan.checkpoint} after step {plan.step} as {plan.dtype}")
        with progress.task("exporting"):
            write(plan, options)
        progress.log(f"done: {options.out}")
    finally:
        leave()


def make_plan(options: argparse.Namespace, job: Job, progress: Progress) -> Plan:
    """The newest whole checkpoint and the model it is of (a collective).

    Raises `BadCheckpoint`, `ExportRefused`.
    """
    from megatron_rl.run.checkpoints.resume import checkpoints_at, newest_complete

    with progress.task("comparing the files with their hashes"):
        checkpoint, damaged = newest_complete(checkpoints_at(options.checkpoint), job)
    if checkpoint is None:
        found = " | ".join(damaged) or "none at all"
        raise BadCheckpoint(
            f"{options.checkpoint}: no whole checkpoint is there ({found}). Give another one"
        )
    for problem in damaged:
        progress.log(f"warning: a damaged checkpoint is passed over: {problem}")
    state = read_state(checkpoint)
    model = model_of(state, options.model)
    dtype = options.dtype or state.settings.get("run.save_dtype") or model.dtype
    require_room(options.out, model, dtype)
    return Plan(checkpoint, model, dtype, state.step)


def model_of(state: RunState, given: Path | None) -> ModelSettings:
    """The start checkpoint, whose configuration and tokenizer the result gets.

    Raises `ExportRefused`.
    """
    path = str(given if given is not None else state.settings.get("model.path", ""))
    key = (
        f"--model={given}"
        if given is not None
        else f"model.path={path!r}, of the checkpoint's settings"
    )
    _, problems = inspect_checkpoint(path, weights=False)
    if not problems:
        return ModelSettings(path=path, dtype=state.settings.get("model.dtype", "float32"))
    told = "; ".join(f"{problem.rule}. {problem.remedy}" for problem in problems)
    raise ExportRefused(
        f"{key}: {told}" + ("" if given is not None else ", or say where it is: --model=PATH")
    )


def require_room(out: Path, model: ModelSettings, dtype: str) -> None:
    """Raises `ExportRefused` when the result would not fit on its disk."""
    from megatron_rl.models.parameter_count import num_parameters

    needed = num_parameters(read_shape(model.path)) * BYTES[dtype]
    if (free := free_bytes(out)) < needed:
        raise ExportRefused(
            f"--out={out}: {free / MIB:,.0f} MiB are free there, and it takes {needed / MIB:,.0f} MiB"
        )


def write(plan: Plan, options: argparse.Namespace) -> None:
    """A collective. Raises `BadCheckpoint`, and `CheckpointError` for NaN and Inf."""
    import torch

    from megatron_rl.mcore.checkpoint import SavedWeights, write_hf

    shape, bucket_bytes = read_shape(plan.model.path), int(options.bucket_mib * MIB)
    dtype: Any = getattr(torch, plan.dtype)
    try:
        saved = SavedWeights(plan.checkpoint, shape, plan.model, bucket_bytes=bucket_bytes)
        write_hf(saved, options.out, source=Path(plan.model.path), dtype=dtype)
    except ValueError as error:
        raise BadCheckpoint(
            f"{error}. It was trained from --model=PATH, and {plan.model.path} is another"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
