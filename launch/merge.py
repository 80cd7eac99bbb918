"""Makes one checkpoint out of several of the same model, without a GPU and with one tensor in
memory at a time.

    python launch/merge.py linear --models A B --weights 0.7 0.3 --out DIR
    python launch/merge.py ties --base START --models A B --density 0.2 --out DIR

linear: the weighted mean. ties: what moved most from the base, where the models agree on its sign
(arXiv 2306.01708). Configuration and tokenizer of the result are the first model's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.tokenizer import Tokenizer, TokenizerError
from megatron_rl.models.weight_files import DamagedWeights, check_weight_files
from megatron_rl.records.progress import Progress
from megatron_rl.records.write_errors import free_bytes, write_problem

DTYPES = ("float32", "bfloat16", "float16")
NAMES_ONLY = {
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
}  # of config.json: not what is computed


class MergeRefused(Failure):
    """The command asks for what cannot be; nothing was written."""

    exit_code = ExitCode.REFUSED


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge and return the exit code."""
    options = parse(arguments)
    try:
        weights = require_options(options)
        sources = [*([options.base] if options.method == "ties" else []), *options.models]
        require_one_model(sources)
        require_room(options, sources)
        merge(options, weights, sources)
    except Failure as refused:
        print(refused, file=sys.stderr)
        return refused.exit_code
    except KeyboardInterrupt:
        print(f"interrupted: {options.out} was not written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Exception as error:  # safetensors has an exception of its own for a full disk
        problem = write_problem(error, options.out, key="--out")
        if problem is None and not isinstance(error, OSError):
            raise
        print(problem or f"--out={options.out}: {error}", file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    print(f"done: {options.out}")
    return ExitCode.OK


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("method", choices=("linear", "ties"))
    parser.add_argument(
        "--models", type=Path, nargs="+", required=True, help="checkpoints in Hugging Face format"
    )
    parser.add_argument(
        "--weights", type=float, nargs="+", help="one for each model; all the same when not given"
    )
    parser.add_argument("--base", type=Path, help="ties: the checkpoint they were all trained from")
    parser.add_argument(
        "--density",
        type=float,
        help="ties: share of each tensor's changes that is kept (default 0.2)",
    )
    parser.add_argument(
        "--scale", type=float, help="ties: what the merged changes are multiplied by (default 1)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the result; that of the first checkpoint when not given"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a directory that does not exist yet"
    )
    return parser.parse_args(arguments)


def require_options(options: argparse.Namespace) -> list[float]:
    """The models' weights.

    Raises `MergeRefused` for numbers that make no merge, and for options that do nothing.
    """
    refusals = list(_refusals(options))
    if refusals:
        raise MergeRefused("\n".join([*refusals, "nothing was written."]))
    return list(options.weights or [1.0] * len(options.models))


def _refusals(options: argparse.Namespace) -> Iterator[str]:
    weights = options.weights or [1.0] * len(options.models)
    if len(options.models) < 2:
        yield f"--models={options.models[0]}: at least two are merged"
    if len(weights) != len(options.models):
        yield f"--weights={weights}: {len(options.models)} models need as many weights"
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        yield f"--weights={weights}: they must be finite, none negative, and not all 0"
    if options.out.exists():
        yield f"--out={options.out}: it exists. Give a directory that does not"
    if options.method == "ties":
        if options.base is None:
            yield "--base: ties needs the checkpoint that the models were trained from"
        if options.density is not None and not 0 < options.density <= 1:
            yield f"--density={options.density}: it must be above 0 and at most 1"
        if options.scale is not None and not (math.isfinite(options.scale) and options.scale > 0):
            yield f"--scale={options.scale}: it must be above 0"
        return
    for name in ("base", "density", "scale"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name}={value}: linear does not use it. Leave it out, or choose ties"


def require_one_model(sources: Sequence[Path]) -> None:
    """Raises `MergeRefused` unless all are whole checkpoints of one configuration and one
    vocabulary.
    """
    first, *others = [(source, *_read(source)) for source in sources]
    for source, config, tokenizer in others:
        for key in sorted((config.keys() | first[1].keys()) - NAMES_ONLY):
            if config.get(key) != first[1].get(key):
                raise MergeRefused(
                    f"{source}: {key}={config.get(key)!r} in config.json, and {first[1].get(key)!r} in {first[0]}: "
                    "they are not of one model"
                )
        if not tokenizer.same_ids(first[2]):
            raise MergeRefused(
                f"{source}: its tokenizer gives tokens other ids than that of {first[0]}"
            )


def _read(source: Path) -> tuple[dict[str, Any], Tokenizer]:
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise MergeRefused(f"{source}: config.json is not an object")
        check_weight_files(source)
        return config, Tokenizer.from_directory(source)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, (TokenizerError, DamagedWeights)):
            raise MergeRefused(f"{source}: {error}") from error
        raise MergeRefused(
            f"{source}: config.json cannot be read ({error}). Give a checkpoint's directory"
        ) from error


def require_room(options: argparse.Namespace, sources: Sequence[Path]) -> None:
    """Raises `MergeRefused` when the result would not fit on its disk."""
    widening = 2 if options.dtype == "float32" else 1
    needed = widening * sum(file.stat().st_size for file in sources[0].glob("*.safetensors"))
    if (free := free_bytes(options.out)) < needed:
        raise MergeRefused(
            f"--out={options.out}: {free >> 20} MiB are free there, and it may need {needed >> 20} MiB"
        )


def merge(options: argparse.Namespace, weights: Sequence[float], sources: Sequence[Path]) -> None:
    """Write the result. torch is imported here: whatever is refused is refused before."""
    import torch

    from megatron_rl.models import merging

    density = 0.2 if options.density is None else options.density
    scale = 1.0 if options.scale is None else options.scale

    def one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if options.method == "linear":
            return merging.linear(tensors, weights)
        return merging.ties(tensors[0], tensors[1:], weights, density=density, scale=scale)

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    progress = Progress(0, enabled=True)
    progress.log(f"merging {len(sources)} checkpoints")
    with progress.task("merging"):
        merging.merge_checkpoints(sources, options.out, one, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
