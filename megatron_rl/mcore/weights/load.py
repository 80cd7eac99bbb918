"""Loads a Hugging Face checkpoint into a rank's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.mcore.weights.layout import ParameterLayout, join
from megatron_rl.mcore.weights.parameters import PlacedParameter, placed_parameters
from megatron_rl.models.hf_checkpoint.reader import CheckpointReader
from megatron_rl.models.names import Fusion
from megatron_rl.models.shape import ModelShape

_MISMATCH = "config.json and the weights do not belong together"


@torch.no_grad()
def load_hf_weights(
    models: Sequence[torch.nn.Module],
    shape: ModelShape,
    path: str | Path,
    *,
    key: str = "model.path",
) -> None:
    """Copy the checkpoint at `path` into the models' parameters, converted to their dtypes.

    key: the setting that names `path`, for messages.

    Raises `Failure` for missing or damaged files and for shapes that do not fit the model.
    """
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    with CheckpointReader(Path(path), key) as tensors:
        for parameter in placed_parameters(models, shape):
            layout = parameter.layout(ep_rank)
            parts = [tensors.read(name) for name in layout.hf_names]
            _check_shapes(path, layout, parts, parameter.whole_shape(layout), shape)
            part = parameter.part_of(join(layout.fusion, parts, shape), layout)
            _check_part(path, layout, part, parameter)
            parameter.weight.copy_(part)


def _check_part(
    path: str | Path, layout: ParameterLayout, part: torch.Tensor, parameter: PlacedParameter
) -> None:
    if part.shape != parameter.weight.shape:
        raise Failure(
            f"{path}: {', '.join(layout.hf_names)} give {tuple(part.shape)} for "
            f"{parameter.name}, which is {tuple(parameter.weight.shape)}: {_MISMATCH}",
            ExitCode.BAD_DATA,
        )


def _check_shapes(
    path: str | Path,
    layout: ParameterLayout,
    tensors: Sequence[torch.Tensor],
    whole_shape: tuple[int, ...],
    shape: ModelShape,
) -> None:
    """Refuse shapes that fusing or padding would hide.

    Without this check some would also raise errors that name no tensor.

    whole_shape: the shape of the parameter over all its ranks.
    """
    for name, tensor in zip(layout.hf_names, tensors, strict=True):
        if tensor.ndim != len(whole_shape):
            raise Failure(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, but the model's tensor has "
                f"{len(whole_shape)} dimension(s): {_MISMATCH}",
                ExitCode.BAD_DATA,
            )
    rows = _expected_rows(layout.fusion, whole_shape, shape)
    if rows is None:
        return
    columns = whole_shape[1]
    for name, tensor, expected_rows in zip(layout.hf_names, tensors, rows, strict=True):
        if tensor.shape != (expected_rows, columns):
            raise Failure(
                f"{path}: {name} has {tensor.shape[0]} rows and {tensor.shape[1]} columns, but "
                f"config.json requires {expected_rows} and {columns}: {_MISMATCH}",
                ExitCode.BAD_DATA,
            )


def _expected_rows(
    fusion: Fusion, whole_shape: tuple[int, ...], shape: ModelShape
) -> list[int] | None:
    """Return the rows of each tensor of a parameter; None if the parameter has one tensor.

    A parameter of one tensor needs no check here, unless its vocabulary is padded.
    """
    if fusion is Fusion.VOCABULARY:
        return [shape.vocab_size]
    if fusion is Fusion.QKV:
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
        return [count * shape.head_dim for count in heads]
    if fusion is Fusion.GATED:
        return [whole_shape[0] // 2] * 2
    return None
