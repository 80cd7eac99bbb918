"""Export a training checkpoint to Hugging Face format, or merge several checkpoints into one.

No GPU is used. `export --help` and `merge --help` list the options.

Examples:

    python launch/checkpoint.py export runs/NAME --out exported
    torchrun --nproc-per-node 4 launch/checkpoint.py export \\
        runs/NAME/checkpoints/iter_0000010 --out exported --dtype bfloat16
    python launch/checkpoint.py merge linear --models A B --weights 0.7 0.3 --out merged
    python launch/checkpoint.py merge ties --base START --models A B --density 0.2 --out merged

Output: the directory OUT with config.json, the tokenizer and *.safetensors, which transformers
and SGLang load. OUT appears when it is complete; a command that fails leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.write_errors import write_problem
from megatron_rl.run.checkpoints.export import (
    BYTES_PER_VALUE,
    ExportRefused,
    ExportRequest,
    check_request,
    export_checkpoint,
)
from megatron_rl.run.checkpoints.merge import (
    DEFAULT_DENSITY,
    DEFAULT_SCALE,
    MergeRequest,
    merge,
)

_EXPORT = """Write the model of a training checkpoint in Hugging Face format.

    python launch/checkpoint.py export runs/NAME --out exported
    torchrun --nproc-per-node 4 launch/checkpoint.py export \\
        runs/NAME/checkpoints/iter_0000010 --out exported --dtype bfloat16
    python launch/checkpoint.py export runs/NAME --out exported-fp8 --dtype bfloat16 --fp8

CHECKPOINT is the directory of a run, whose newest complete checkpoint is exported, or of one
checkpoint, whatever its parallel layout. All files are compared with their hashes first. A rank
holds one bucket of weights at a time, and several ranks share the work.

Output: OUT, with the configuration and the tokenizer of the start checkpoint.
"""
_MERGE = """Merge checkpoints of one model.

    python launch/checkpoint.py merge linear --models A B --weights 0.7 0.3 --out merged
    python launch/checkpoint.py merge ties --base START --models A B --density 0.2 --out merged

linear: the weighted mean of the weights. ties: the largest changes from the base, where the
models agree on their sign (arXiv 2306.01708). One tensor is in memory at a time.

Output: OUT, with the configuration and the tokenizer of the first model.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand and return the exit code."""
    options = parse_arguments(arguments)
    if options.command == "merge":
        request = MergeRequest(
            method=options.method,
            models=options.models,
            out=options.out,
            weights=options.weights,
            base=options.base,
            density=options.density,
            scale=options.scale,
            dtype=options.dtype,
        )
        return exit_code_of(lambda: merge(request), options.out)
    return exit_code_of(
        lambda: _export(
            ExportRequest(
                source=options.checkpoint,
                out=options.out,
                dtype=options.dtype,
                fp8=options.fp8,
                unquantized_first=options.unquantized_first,
                unquantized_last=options.unquantized_last,
                model=options.model,
                bucket_mib=options.bucket_mib,
            )
        ),
        options.out,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = _parser(argparse.ArgumentParser, __doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{export,merge}")
    _add_export(_parser(commands.add_parser, _EXPORT, "export", "write it for transformers"))
    _add_merge(_parser(commands.add_parser, _MERGE, "merge", "make one checkpoint of several"))
    return parser.parse_args(arguments)


def _parser(
    make: Callable[..., argparse.ArgumentParser], description: str, *name: str
) -> argparse.ArgumentParser:
    """Make a parser, or the parser of a subcommand from its name and its short help."""
    subcommand = {} if not name else {"name": name[0], "help": name[1]}
    return make(
        **subcommand,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="directory of a run, or of one checkpoint",
    )
    _add_output(parser, "data type of the result (default: the training dtype)")
    parser.add_argument(
        "--model", type=Path, help="start checkpoint, if model.path of the run has moved"
    )
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="write FP8 weights with scales for blocks of 128 x 128, as engine.quantization=fp8 "
        "sends them; the other tensors have --dtype",
    )
    for end in ("first", "last"):
        parser.add_argument(
            f"--unquantized-{end}",
            type=int,
            default=0,
            metavar="LAYERS",
            help=f"with --fp8: layers at the {end} end that stay in --dtype (default: 0)",
        )
    parser.add_argument(
        "--bucket-mib",
        type=float,
        default=1024.0,
        help="MiB of weights that a rank holds at a time (default: 1024)",
    )


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=("linear", "ties"))
    parser.add_argument(
        "--models", type=Path, nargs="+", required=True, help="checkpoints in Hugging Face format"
    )
    parser.add_argument(
        "--weights", type=float, nargs="+", help="one for each model (default: all equal)"
    )
    parser.add_argument(
        "--base", type=Path, help="ties: the checkpoint that all models were trained from"
    )
    parser.add_argument(
        "--density",
        type=float,
        help=f"ties: share of each tensor's changes to keep (default: {DEFAULT_DENSITY})",
    )
    parser.add_argument(
        "--scale", type=float, help=f"ties: factor of the merged changes (default: {DEFAULT_SCALE})"
    )
    _add_output(parser, "data type of the result (default: as in the first model)")


def _add_output(parser: argparse.ArgumentParser, dtype_help: str) -> None:
    parser.add_argument("--dtype", choices=list(BYTES_PER_VALUE), help=dtype_help)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to create; it must not exist yet"
    )


def _export(request: ExportRequest) -> None:
    check_request(request)
    # torchrun ends the other ranks with SIGTERM when one has failed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    export_checkpoint(request)


def exit_code_of(work: Callable[[], None], out: Path) -> int:
    """Run `work` and return its exit code. Expected errors are printed in one sentence."""
    try:
        work()
    except Failure as failure:
        # All ranks refuse for the same reason, so one of them prints it.
        if not isinstance(failure, ExportRefused) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(failure, file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print(f"interrupted: {out} was not written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Exception as error:
        return _exit_code_of_error(error, out)
    return ExitCode.OK


def _exit_code_of_error(error: Exception, out: Path) -> int:
    """Explain a disk that cannot be written or the end of another rank. Raise any other error."""
    # safetensors reports a full disk with an exception of its own.
    problem = write_problem(error, out, key="--out")
    if problem is not None or isinstance(error, OSError):
        print(problem or f"--out={out}: {error}", file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    # torch reports the end of another rank with a RuntimeError.
    if isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        print(
            f"another rank failed and reports the cause. {out} was not written ({error})",
            file=sys.stderr,
        )
        return ExitCode.PEER_FAILED
    raise error


if __name__ == "__main__":
    sys.exit(main())
