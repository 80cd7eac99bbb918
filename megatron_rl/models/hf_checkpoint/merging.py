"""One checkpoint out of several of the same model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_rl.models.hf_checkpoint.reader import CheckpointError, CheckpointReader
from megatron_rl.models.hf_checkpoint.writer import (
    SHARD_BYTES,
    ShardWriter,
    begin_checkpoint,
    commit_checkpoint,
    discard_checkpoint,
)

# in its own dtype: a router's bias that is rounded chooses other experts
_KEPT = ".e_score_correction_bias"

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def linear(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Σ wᵢ θᵢ / Σ wᵢ, float32. tensors: of one shape; weights: as many, with a sum above 0."""
    merged = torch.zeros(tensors[0].shape)
    for tensor, weight in zip(tensors, weights, strict=True):
        merged.add_(tensor.float(), alpha=weight)
    return merged / sum(weights)


def ties(
    base: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    weights: Sequence[float],
    *,
    density: float,
    scale: float,
) -> torch.Tensor:
    """TIES (Yadav et al., arXiv 2306.01708, algorithm 1), float32: trim, elect a sign, average what
    has it.

    τᵢ = θᵢ − θ_base keeps the share `density` of its values with the largest magnitudes, at least
    one; γ = sgn Σ wᵢ τᵢ; θ = θ_base + scale · Σ wᵢ τᵢ / Σ wᵢ over the i with sgn τᵢ = γ. density is
    of each tensor, not of the whole model.
    """
    start = base.float()
    trimmed = [_trim(tensor.float() - start, density) for tensor in tensors]
    elected = torch.zeros_like(start)
    for task, weight in zip(trimmed, weights, strict=True):
        elected.add_(task, alpha=weight)
    elected.sign_()
    merged, total = torch.zeros_like(start), torch.zeros_like(start)
    for task, weight in zip(trimmed, weights, strict=True):
        agrees = (task.sign() == elected) & (task != 0)
        merged.add_(task * agrees, alpha=weight)
        total.add_(agrees, alpha=weight)
    return start + scale * merged / total.masked_fill_(total == 0, 1.0)


def merge_checkpoints(
    sources: Sequence[Path],
    target: Path,
    merge: Merge,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write what `merge` makes of the sources' tensors, one after the other, as a checkpoint like
    the first.

    dtype: of the result; None: the first's. Raises `CheckpointError` before anything is written if
    their tensors' names or shapes differ, and leaves nothing behind when it fails.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(CheckpointReader(source, "checkpoint")) for source in sources]
        _require_same_tensors(sources, files)
        begin_checkpoint(target)
        stack.callback(discard_checkpoint, target)
        writer = ShardWriter(target, shard_bytes=shard_bytes)
        for name in files[0].names:
            tensors = [file.read(name) for file in files]
            own = dtype is None or name.endswith(_KEPT)
            merged = merge(tensors).to(tensors[0].dtype if own else dtype)
            if not merged.isfinite().all():
                raise CheckpointError(
                    f"{name} would hold NaN or Inf in {merged.dtype}. Choose other weights, or a dtype with more range"
                )
            writer.add(name, merged)
        writer.close()
        commit_checkpoint(target, source=sources[0], dtype=dtype)


def _require_same_tensors(sources: Sequence[Path], files: Sequence[CheckpointReader]) -> None:
    first, expected = sources[0], files[0].shapes()
    for source, file in zip(sources[1:], files[1:], strict=True):
        shapes = file.shapes()
        if one_sided := sorted(expected.keys() ^ shapes.keys()):
            holder, lacker = (first, source) if one_sided[0] in expected else (source, first)
            raise CheckpointError(
                f"{holder} holds {one_sided[0]} and {lacker} does not: they are not of one model"
            )
        for name, shape in expected.items():
            if shapes[name] != shape:
                raise CheckpointError(
                    f"{name} has the shape {shape} in {first} and {shapes[name]} in {source}: they are not of one model"
                )


def _trim(task: torch.Tensor, density: float) -> torch.Tensor:
    """Zero all but the largest magnitudes; of equal ones at the border the first are kept."""
    magnitude = task.abs().flatten()
    keep = max(1, round(density * magnitude.numel()))
    border = magnitude.kthvalue(magnitude.numel() - keep + 1).values
    kept, equal = magnitude > border, magnitude == border
    kept |= equal & (equal.cumsum(0) <= keep - kept.sum())
    return task * kept.view_as(task)
