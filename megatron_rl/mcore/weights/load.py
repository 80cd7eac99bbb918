"""Loads a Hugging Face checkpoint into a rank's model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.mcore.weights.layout import Fusion, ParameterLayout, join, shard
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.weight_files import DamagedWeights, weight_map

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # all others need scales, which are not read


class CheckpointError(Failure, RuntimeError):
    """The checkpoint's files cannot be read, or lack a tensor the model needs, or hold it in another shape or dtype, or
    not finite."""

    exit_code = ExitCode.BAD_DATA


@torch.no_grad()
def load_hf_weights(models: Sequence[torch.nn.Module], shape: ModelShape, path: str | Path) -> None:
    """Copy the checkpoint at `path` into the models' parameters, converting dtypes. Raises `CheckpointError`."""
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    with contextlib.ExitStack() as stack:
        tensors = _TensorFiles(Path(path), stack)
        for parameter in placed_parameters(models, shape):
            layout = parameter.layout(ep_rank)
            parts = [tensors.read(name) for name in layout.hf_names]
            _check_shapes(path, layout, parts, parameter.weight.ndim, shape)
            full = join(layout.fusion, parts, shape)
            rank, size = _tensor_rank(layout.expert is not None)
            if layout.fusion is Fusion.ROWS:
                full = F.pad(full, (0, 0, 0, parameter.weight.shape[0] * size - full.shape[0]))
            part = shard(layout.fusion, full, rank, size)
            if part.shape != parameter.weight.shape:
                raise CheckpointError(
                    f"{path}: {', '.join(layout.hf_names)} give {tuple(part.shape)} for {parameter.name}, which is "
                    f"{tuple(parameter.weight.shape)}: config.json and the weights do not belong together"
                )
            parameter.weight.copy_(part)


def _check_shapes(
    path: str | Path, layout: ParameterLayout, tensors: Sequence[torch.Tensor], ndim: int, shape: ModelShape
) -> None:
    """Refuse shapes that fusing or padding would hide, or answer with an error that names no tensor."""
    for name, tensor in zip(layout.hf_names, tensors, strict=True):
        if tensor.ndim != ndim:
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, and the model's has {ndim} dimension(s): "
                "config.json and the weights do not belong together"
            )
    heads = shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads
    if layout.fusion is Fusion.ROWS:
        expected = [shape.vocab_size]
    elif layout.fusion is Fusion.QKV:
        expected = [count * shape.head_dim for count in heads]
    elif layout.fusion is Fusion.GATED:
        expected = [shape.ffn_hidden_size if layout.expert is None else shape.moe_ffn_hidden_size] * 2
    else:
        return
    for name, tensor, rows in zip(layout.hf_names, tensors, expected, strict=True):
        if tensor.shape != (rows, shape.hidden_size):
            raise CheckpointError(
                f"{path}: {name} has {tensor.shape[0]} rows and {tensor.shape[1]} columns, config.json says {rows} and "
                f"{shape.hidden_size}: they do not belong together"
            )


def _tensor_rank(is_expert: bool) -> tuple[int, int]:
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


class _TensorFiles:
    """The safetensors files of a checkpoint directory, opened once, read lazily."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._open: dict[str, Any] = {}
        try:
            self._file_of = weight_map(directory)
        except DamagedWeights as error:
            raise self._unusable(str(error)) from error

    def read(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise self._unusable(f"tensor {name} is missing")
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
            tensor = self._open[file].get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise self._unusable(f"tensor {name} of {file} cannot be read ({error})") from error
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"model.path={str(self._directory)!r}: tensor {name} is {tensor.dtype}; weights must be float32, "
                "bfloat16 or float16, because scales of quantized ones are not read. Use the bf16 checkpoint"
            )
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():  # NaN is both of them
            raise self._unusable(f"tensor {name} of {file} holds NaN or Inf")
        return tensor

    def _unusable(self, rule: str) -> CheckpointError:
        return CheckpointError(f"model.path={str(self._directory)!r}: {rule}. Copy or download the checkpoint again")
