"""Loads a Hugging Face checkpoint into a rank's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_rl.mcore.weights.layout import ParameterLayout, join
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.names import Fusion
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensor_files import CheckpointError, TensorFiles


@torch.no_grad()
def load_hf_weights(models: Sequence[torch.nn.Module], shape: ModelShape, path: str | Path) -> None:
    """Copy the checkpoint at `path` into the models' parameters, converting dtypes.

    Raises `CheckpointError`.
    """
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    with TensorFiles(Path(path)) as tensors:
        for parameter in placed_parameters(models, shape):
            layout = parameter.layout(ep_rank)
            parts = [tensors.read(name) for name in layout.hf_names]
            _check_shapes(path, layout, parts, parameter.whole_shape(layout), shape)
            part = parameter.part_of(join(layout.fusion, parts, shape), layout)
            if part.shape != parameter.weight.shape:
                raise CheckpointError(
                    f"{path}: {', '.join(layout.hf_names)} give {tuple(part.shape)} for {parameter.name}, which is "
                    f"{tuple(parameter.weight.shape)}: config.json and the weights do not belong together"
                )
            parameter.weight.copy_(part)


def _check_shapes(
    path: str | Path,
    layout: ParameterLayout,
    tensors: Sequence[torch.Tensor],
    whole: tuple[int, ...],
    shape: ModelShape,
) -> None:
    """Refuse shapes that fusing or padding would hide, or answer with an error that names no
    tensor.

    whole: the shape of the parameter over all its ranks.
    """
    for name, tensor in zip(layout.hf_names, tensors, strict=True):
        if tensor.ndim != len(whole):
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, and the model's has {len(whole)} dimension(s): "
                "config.json and the weights do not belong together"
            )
    heads = shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads
    if layout.fusion is Fusion.VOCABULARY:
        expected = [shape.vocab_size]
    elif layout.fusion is Fusion.QKV:
        expected = [count * shape.head_dim for count in heads]
    elif layout.fusion is Fusion.GATED:
        expected = [whole[0] // 2] * 2
    else:
        return
    for name, tensor, rows in zip(layout.hf_names, tensors, expected, strict=True):
        if tensor.shape != (rows, whole[1]):
            raise CheckpointError(
                f"{path}: {name} has {tensor.shape[0]} rows and {tensor.shape[1]} columns, config.json says {rows} and "
                f"{whole[1]}: they do not belong together"
            )
