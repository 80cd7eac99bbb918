"""Loads a Hugging Face checkpoint into a rank's model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open

from megatron_rl.mcore.weights.layout import Kind, ParameterLayout, join, shard
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.qwen3_moe import ModelShape


class CheckpointError(RuntimeError):
    """The checkpoint's files cannot be read, or lack a tensor the model needs or hold it in another shape or dtype."""


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # all others need scales, which are not read
_UNREADABLE = (OSError, ValueError, RecursionError, SafetensorError)


@torch.no_grad()
def load_hf_weights(models: Sequence[torch.nn.Module], model: ModelShape, path: str | Path) -> None:
    """Copy the checkpoint at `path` into the models' parameters, converting dtypes. Raises `CheckpointError`."""
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    with contextlib.ExitStack() as stack:
        tensors = _TensorFiles(Path(path), stack)
        for parameter in placed_parameters(models, model):
            layout = parameter.layout(ep_rank)
            parts = [tensors.read(name) for name in layout.hf_names]
            _check_shapes(path, layout, parts, parameter.weight.ndim, model)
            full = join(layout.kind, parts, model)
            rank, size = _tensor_rank(layout.expert is not None)
            if layout.kind is Kind.ROWS:
                full = F.pad(full, (0, 0, 0, parameter.weight.shape[0] * size - full.shape[0]))
            part = shard(layout.kind, full, rank, size)
            if part.shape != parameter.weight.shape:
                raise CheckpointError(
                    f"{path}: {', '.join(layout.hf_names)} give {tuple(part.shape)} for {parameter.name}, which is "
                    f"{tuple(parameter.weight.shape)}: config.json and the weights do not belong together"
                )
            parameter.weight.copy_(part)


def _check_shapes(
    path: str | Path, layout: ParameterLayout, tensors: Sequence[torch.Tensor], ndim: int, model: ModelShape
) -> None:
    """Refuse shapes that fusing or padding would hide, or answer with an error that names no tensor."""
    for name, tensor in zip(layout.hf_names, tensors, strict=True):
        if tensor.ndim != ndim:
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, and the model's has {ndim} dimension(s): "
                "config.json and the weights do not belong together"
            )
    heads = model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads
    if layout.kind is Kind.ROWS:
        expected = [model.vocab_size]
    elif layout.kind is Kind.QKV:
        expected = [count * model.head_dim for count in heads]
    elif layout.kind is Kind.GATED:
        expected = [model.ffn_hidden_size if layout.expert is None else model.moe_ffn_hidden_size] * 2
    else:
        return
    for name, tensor, rows in zip(layout.hf_names, tensors, expected, strict=True):
        if tensor.shape != (rows, model.hidden_size):
            raise CheckpointError(
                f"{path}: {name} has {tensor.shape[0]} rows and {tensor.shape[1]} columns, config.json says {rows} and "
                f"{model.hidden_size}: they do not belong together"
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
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self._file_of = self._read_index(index)
        elif (directory / "model.safetensors").is_file():
            self._file_of = dict.fromkeys(self._handle("model.safetensors").keys(), "model.safetensors")
        else:
            raise CheckpointError(f"model.path={str(directory)!r}: no model.safetensors or its index is there")

    def read(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise CheckpointError(f"model.path={str(self._directory)!r}: tensor {name} is missing")
        handle = self._handle(self._file_of[name])
        try:
            tensor = handle.get_tensor(name)
        except _UNREADABLE as error:
            raise self._unreadable(f"tensor {name} of {self._file_of[name]}", error) from error
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"model.path={str(self._directory)!r}: tensor {name} is {tensor.dtype}; weights must be float32, "
                "bfloat16 or float16, because scales of quantized ones are not read. Use the bf16 checkpoint"
            )
        return tensor

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
            except _UNREADABLE as error:
                raise self._unreadable(file, error) from error
        return self._open[file]

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (*_UNREADABLE, KeyError, TypeError, AttributeError) as error:
            raise self._unreadable(index.name, error) from error

    def _unreadable(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"model.path={str(self._directory)!r}: {what} cannot be read ({type(error).__name__}: {error}). "
            "Copy or download the checkpoint again"
        )
