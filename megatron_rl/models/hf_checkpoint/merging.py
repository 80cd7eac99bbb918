"""Merges checkpoints of the same model into one, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.hf_checkpoint.reader import CheckpointReader
from megatron_rl.models.hf_checkpoint.writer import (
    SHARD_BYTES,
    ShardWriter,
    begin_checkpoint,
    commit_checkpoint,
    discard_checkpoint,
)

# Tensors with this suffix keep their dtype, because rounding the router's bias would change the
# selected experts.
_KEEPS_DTYPE = ".e_score_correction_bias"

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def linear(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean Σ wᵢ θᵢ / Σ wᵢ in float32.

    tensors: θ, all of one shape.
    weights: w, one for each tensor, with a positive sum.
    """
    weighted_sum = torch.zeros(tensors[0].shape)
    for tensor, weight in zip(tensors, weights, strict=True):
        weighted_sum.add_(tensor.float(), alpha=weight)
    return weighted_sum / sum(weights)


def ties(
    base: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    weights: Sequence[float],
    *,
    density: float,
    scale: float,
) -> torch.Tensor:
    """Merge with TIES in float32 (Yadav et al., arXiv 2306.01708, algorithm 1).

    Trim each difference τᵢ = θᵢ − θ_base to its share `density` of the largest magnitudes, at least
    one value. Elect a sign γ = sgn Σ wᵢ τᵢ. Average the values with this sign:
    θ = θ_base + scale · Σ wᵢ τᵢ / Σ wᵢ over the i with sgn τᵢ = γ.

    density: share of each tensor, not of the whole model.
    """
    start = base.float()
    tasks = [_trim(tensor.float() - start, density) for tensor in tensors]
    sign = torch.zeros_like(start)
    for task, weight in zip(tasks, weights, strict=True):
        sign.add_(task, alpha=weight)
    sign.sign_()
    weighted_sum = torch.zeros_like(start)
    total_weight = torch.zeros_like(start)
    for task, weight in zip(tasks, weights, strict=True):
        agrees = (task.sign() == sign) & (task != 0)
        weighted_sum.add_(task * agrees, alpha=weight)
        total_weight.add_(agrees, alpha=weight)
    return start + scale * weighted_sum / total_weight.masked_fill_(total_weight == 0, 1.0)


def merge_checkpoints(
    sources: Sequence[Path],
    target: Path,
    merge: Merge,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Merge the sources' tensors, one after the other, and write the result as a checkpoint.

    merge: function from one tensor of every source to the merged tensor.
    dtype: dtype of the result. None: as in the first source.

    Configuration and tokenizer come from the first source. Raises `Failure` before
    writing if the names or shapes of the tensors differ. Removes partial files after a failure.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(CheckpointReader(source, "checkpoint")) for source in sources]
        _require_same_tensors(sources, files)
        begin_checkpoint(target)
        stack.callback(discard_checkpoint, target)
        writer = ShardWriter(target, shard_bytes=shard_bytes)
        for name in files[0].names:
            tensors = [file.read(name) for file in files]
            keeps_dtype = dtype is None or name.endswith(_KEEPS_DTYPE)
            tensor = merge(tensors).to(tensors[0].dtype if keeps_dtype else dtype)
            if not tensor.isfinite().all():
                raise Failure(
                    f"{name} would hold NaN or Inf in {tensor.dtype}. "
                    "Choose other weights, or a dtype with more range",
                    ExitCode.BAD_DATA,
                )
            writer.add(name, tensor)
        writer.close()
        commit_checkpoint(target, source=sources[0], dtype=dtype)


def _require_same_tensors(sources: Sequence[Path], files: Sequence[CheckpointReader]) -> None:
    first = sources[0]
    first_shapes = files[0].shapes()
    for source, file in zip(sources[1:], files[1:], strict=True):
        shapes = file.shapes()
        differences = sorted(first_shapes.keys() ^ shapes.keys())
        if differences:
            name = differences[0]
            holder, other = (first, source) if name in first_shapes else (source, first)
            raise Failure(
                f"{holder} holds {name} and {other} does not: they are not of one model",
                ExitCode.BAD_DATA,
            )
        for name, shape in first_shapes.items():
            if shapes[name] != shape:
                raise Failure(
                    f"{name} has the shape {shape} in {first} and {shapes[name]} in {source}: "
                    "they are not of one model",
                    ExitCode.BAD_DATA,
                )


def _trim(task: torch.Tensor, density: float) -> torch.Tensor:
    """Set all values but the largest magnitudes to 0. Of equal magnitudes, the first remain."""
    magnitude = task.abs().flatten()
    count = max(1, round(density * magnitude.numel()))
    threshold = magnitude.kthvalue(magnitude.numel() - count + 1).values
    mask = magnitude > threshold
    is_equal = magnitude == threshold
    mask |= is_equal & (is_equal.cumsum(0) <= count - mask.sum())
    return task * mask.view_as(task)
