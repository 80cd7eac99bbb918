"""Writes a checkpoint in Hugging Face format: beside its place, and put there when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.models.hf_checkpoint.weight_files import tensor_names

SHARD_BYTES = 4 << 30
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def begin_checkpoint(target: Path) -> None:
    """Make room for a checkpoint that will be `target`."""
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def discard_checkpoint(target: Path) -> None:
    """Remove what was written of a checkpoint that will not be complete."""
    shutil.rmtree(_partial(target), ignore_errors=True)


def commit_checkpoint(target: Path, *, source: Path, dtype: torch.dtype | None) -> None:
    """Make what was written `target`, with the tokenizer and configuration of `source`; what was
    there goes.

    dtype: what the configuration shall name; None: what it names.
    """
    partial = _partial(target)
    _write_index(partial)
    _copy_companions(source, partial, dtype)
    _flush(partial)
    _replace(target, partial)


class ShardWriter:
    """Collects tensors of a checkpoint that was begun, and writes shards. prefix: of its files,
    each writer's own.

    shard_bytes: of the tensors that it holds at most, or one tensor.
    """

    def __init__(self, target: Path, prefix: str = "model", shard_bytes: int = SHARD_BYTES) -> None:
        self._most = shard_bytes
        self._path = f"{_partial(target)}/{prefix}"
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._count = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._bytes and self._bytes + tensor.nbytes > self._most:
            self.close()
        self._tensors[name] = tensor.cpu().clone()
        self._bytes += tensor.nbytes

    def close(self) -> None:
        """Write what is left."""
        save_file(
            self._tensors, f"{self._path}-{self._count:05d}.safetensors", metadata={"format": "pt"}
        )
        self._tensors, self._bytes, self._count = {}, 0, self._count + 1


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


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


def _write_index(directory: Path) -> None:
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        files[0].rename(directory / "model.safetensors")
        return
    total = sum(file.stat().st_size for file in files)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in sorted(tensor_names(file))},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if dtype is None:
        return
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
