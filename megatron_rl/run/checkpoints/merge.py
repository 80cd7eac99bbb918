"""Merge of several checkpoints of one model into one, without a GPU.

One tensor of each checkpoint is in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.hf_checkpoint.weight_files import DamagedWeights, check_weight_files
from megatron_rl.models.tokenizer import Tokenizer, TokenizerError
from megatron_rl.records.progress import Progress
from megatron_rl.records.write_errors import free_bytes

if TYPE_CHECKING:
    import torch

# Keys of config.json that do not change what the model computes
_DESCRIPTIVE_KEYS = {"_name_or_path", "dtype", "torch_dtype", "transformers_version"}
DEFAULT_DENSITY = 0.2
DEFAULT_SCALE = 1.0


@dataclass(frozen=True)
class MergeRequest:
    """Options of a merge. An option that is None was not given.

    method: `linear` or `ties`.
    models: checkpoints in Hugging Face format, at least two.
    out: directory to create.
    weights: one weight for each model. None weighs all models equally.
    base: `ties`: the checkpoint that all models were trained from.
    density: `ties`: share of each tensor's changes that is kept, above 0 and at most 1.
    scale: `ties`: factor of the merged changes, above 0.
    dtype: data type of the result. None: as in the first model.
    """

    method: Literal["linear", "ties"]
    models: Sequence[Path]
    out: Path
    weights: Sequence[float] | None = None
    base: Path | None = None
    density: float | None = None
    scale: float | None = None
    dtype: str | None = None

    @property
    def model_weights(self) -> list[float]:
        """One weight for each model."""
        return list(self.weights or [1.0] * len(self.models))

    @property
    def sources(self) -> list[Path]:
        """All checkpoints that are read, the base first."""
        return [*([self.base] if self.base is not None else []), *self.models]


def merge(request: MergeRequest) -> None:
    """Check the checkpoints and write the merged one.

    torch is imported after all checks. Raises `Failure`, also for tensors
    that differ in names or shapes, and for NaN and Inf.
    """
    check_request(request)
    require_same_model(request.sources)
    _require_space(request)
    import torch

    from megatron_rl.models.hf_checkpoint import merging

    weights = request.model_weights
    density = DEFAULT_DENSITY if request.density is None else request.density
    scale = DEFAULT_SCALE if request.scale is None else request.scale

    def merge_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if request.method == "linear":
            return merging.linear(tensors, weights)
        return merging.ties(tensors[0], tensors[1:], weights, density=density, scale=scale)

    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    progress = Progress(0, is_enabled=True)
    progress.log(f"merging {len(request.sources)} checkpoints")
    with progress.task("merging"):
        merging.merge_checkpoints(request.sources, request.out, merge_tensors, dtype=dtype)
    progress.log(f"done: {request.out}")


def check_request(request: MergeRequest) -> None:
    """Raise `Failure` for numbers that give no merge, and for options without an effect."""
    refusals = [*_general_refusals(request), *_method_refusals(request)]
    if refusals:
        raise Failure("\n".join([*refusals, "Nothing was written."]), ExitCode.REFUSED)


def _general_refusals(request: MergeRequest) -> Iterator[str]:
    weights = request.model_weights
    if len(request.models) < 2:
        yield f"--models={request.models[0]}: a merge needs at least two models"
    if len(weights) != len(request.models):
        yield f"--weights={weights}: give one weight for each of the {len(request.models)} models"
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        yield f"--weights={weights}: weights must be finite, none negative, and not all 0"
    if request.out.exists():
        yield f"--out={request.out}: this path exists already. Give a directory that does not exist"


def _method_refusals(request: MergeRequest) -> Iterator[str]:
    if request.method == "linear":
        for name in ("base", "density", "scale"):
            value = getattr(request, name)
            if value is not None:
                yield f"--{name}={value}: linear does not use it. Leave it out, or choose ties"
        return
    if request.base is None:
        yield "--base: ties needs the checkpoint that the models were trained from"
    if request.density is not None and not 0 < request.density <= 1:
        yield f"--density={request.density}: it must be above 0 and at most 1"
    if request.scale is not None and not (math.isfinite(request.scale) and request.scale > 0):
        yield f"--scale={request.scale}: it must be above 0 and finite"


def require_same_model(sources: Sequence[Path]) -> None:
    """Raise `Failure` unless all are complete checkpoints of one model and one vocabulary."""
    first, *others = sources
    first_config, first_tokenizer = _read(first)
    for source in others:
        config, tokenizer = _read(source)
        for key in sorted((config.keys() | first_config.keys()) - _DESCRIPTIVE_KEYS):
            if config.get(key) != first_config.get(key):
                raise Failure(
                    f"{source}: {key}={config.get(key)!r} in config.json, but "
                    f"{first_config.get(key)!r} in {first}. Give checkpoints of one model",
                    ExitCode.REFUSED,
                )
        if not tokenizer.has_same_ids(first_tokenizer):
            raise Failure(
                f"{source}: its tokenizer assigns other token ids than the tokenizer of {first}. "
                "Give checkpoints of one model",
                ExitCode.REFUSED,
            )


def _read(source: Path) -> tuple[dict[str, Any], Tokenizer]:
    """Read the configuration and the tokenizer, and check the weight files."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise Failure(f"{source}: config.json is not an object", ExitCode.REFUSED)
        check_weight_files(source)
        return config, Tokenizer.from_directory(source)
    except (TokenizerError, DamagedWeights) as error:
        raise Failure(f"{source}: {error}", ExitCode.REFUSED) from error
    except (OSError, ValueError, RecursionError) as error:
        raise Failure(
            f"{source}: config.json cannot be read ({error}). Give the directory of a checkpoint",
            ExitCode.REFUSED,
        ) from error


def _require_space(request: MergeRequest) -> None:
    """Raise `Failure` when the result would not fit on its disk."""
    # The largest case: a result in float32 from sources of two bytes a value
    growth = 2 if request.dtype == "float32" else 1
    source_bytes = sum(file.stat().st_size for file in request.sources[0].glob("*.safetensors"))
    free = free_bytes(request.out)
    if free < growth * source_bytes:
        raise Failure(
            f"--out={request.out}: {free >> 20} MiB are free on this disk, and the result may need "
            f"{growth * source_bytes >> 20} MiB. Free some space, or give another directory",
            ExitCode.REFUSED,
        )
