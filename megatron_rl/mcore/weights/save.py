"""Writes a checkpoint in Hugging Face format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megatron_rl.mcore.weights.export import iterate_hf_weights
from megatron_rl.models.shape import ModelShape

_SHARD_BYTES = 4 << 30
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def save_hf_weights(
    models: Sequence[torch.nn.Module],
    shape: ModelShape,
    *,
    source: Path,
    target: Path,
    dtype: torch.dtype,
) -> None:
    """Collective: write the weights as `dtype` to `target`, with the tokenizer and configuration of `source`."""
    partial = target.with_name(target.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    owner = parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    stage = parallel_state.get_pipeline_model_parallel_rank()
    writer = _ShardWriter(partial, f"model-stage{stage:03d}") if owner else None
    for name, tensor in iterate_hf_weights(models, shape, dtype):
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.close()
    dist.barrier()
    if dist.get_rank() == 0:
        _write_index(partial)
        _copy_companions(source, partial, dtype)
        _flush(partial)
        _replace(target, partial)
    dist.barrier()


def _flush(directory: Path) -> None:
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(target: Path, new: Path) -> None:
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


class _ShardWriter:
    """Collects tensors up to a shard's size; each shard has a `.names` file until the index is written."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._count = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._bytes and self._bytes + tensor.nbytes > _SHARD_BYTES:
            self.close()
        self._tensors[name] = tensor.cpu().clone()
        self._bytes += tensor.nbytes

    def close(self) -> None:
        file = self._directory / f"{self._prefix}-{self._count:05d}.safetensors"
        save_file(self._tensors, file, metadata={"format": "pt"})
        file.with_suffix(".names").write_text(json.dumps(list(self._tensors)))
        self._tensors, self._bytes, self._count = {}, 0, self._count + 1


def _write_index(directory: Path) -> None:
    weight_map: dict[str, str] = {}
    for names in sorted(directory.glob("*.names")):
        weight_map |= dict.fromkeys(json.loads(names.read_text()), names.with_suffix(".safetensors").name)
        names.unlink()
    files = sorted(set(weight_map.values()))
    if len(files) == 1:
        (directory / files[0]).rename(directory / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
