"""Writes a checkpoint in Hugging Face format.

All files are written to a partial directory, which takes the target's name when it is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.models.hf_checkpoint.weight_files import tensor_bytes, tensor_names

SHARD_BYTES = 4 << 30
_COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",  # SentencePiece and tiktoken
    "*.tiktoken",
)
# Files whose auto_map names code of the checkpoint
_FILES_WITH_CODE = ("config.json", "tokenizer_config.json")


def begin_checkpoint(target: Path) -> None:
    """Create an empty partial directory for the checkpoint `target`."""
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def discard_checkpoint(target: Path) -> None:
    """Remove the partial directory of a checkpoint that will not be completed."""
    shutil.rmtree(_partial(target), ignore_errors=True)


def commit_checkpoint(
    target: Path,
    *,
    source: Path,
    dtype: torch.dtype | None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Complete the checkpoint and replace `target` with it.

    source: checkpoint whose configuration and tokenizer are copied.
    dtype: dtype to write into the configuration. None: keep the one in the configuration.
    changes: other keys to write into the configuration.
    """
    partial = _partial(target)
    _write_index(partial)
    _copy_companions(source, partial)
    _change_configuration(partial / "config.json", dtype, changes or {})
    _flush(partial)
    _replace(target, partial)


class ShardWriter:
    """Collects tensors of a checkpoint and writes them into shards, after `begin_checkpoint`.

    prefix: start of the shards' names, different for each writer of a checkpoint.
    shard_bytes: size limit of a shard in bytes. A larger tensor gets its own shard.
    """

    def __init__(self, target: Path, prefix: str = "model", shard_bytes: int = SHARD_BYTES) -> None:
        self._max_bytes = shard_bytes
        self._path = f"{_partial(target)}/{prefix}"
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._count = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to the CPU, and write a shard first if the tensor does not fit into it."""
        if self._bytes and self._bytes + tensor.nbytes > self._max_bytes:
            self.close()
        self._tensors[name] = tensor.cpu().clone()
        self._bytes += tensor.nbytes

    def close(self) -> None:
        """Write the collected tensors as a shard."""
        path = Path(f"{self._path}-{self._count:05d}.safetensors")
        save_file(self._tensors, path, metadata={"format": "pt"})
        # safetensors lets nobody but the owner read the file. The directory follows the umask.
        path.chmod(path.parent.stat().st_mode & 0o666)
        self._tensors = {}
        self._bytes = 0
        self._count += 1


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _flush(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
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
    total = sum(tensor_bytes(file) for file in files)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in sorted(tensor_names(file))},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(source: Path, target: Path) -> None:
    files = [file for pattern in _COMPANION_FILES for file in source.glob(pattern)]
    if any(_has_code(source / name) for name in _FILES_WITH_CODE):
        files += source.rglob("*.py")
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _has_code(file: Path) -> bool:
    """Return True if the `auto_map` of a file names code beside it, not of another repository."""
    if not file.is_file():
        return False
    auto_map = json.loads(file.read_text()).get("auto_map") or {}
    values = json.dumps(list(auto_map.values()) if isinstance(auto_map, dict) else auto_map)
    return any("--" not in name for name in re.findall(r'"([^"]+)"', values))


def _change_configuration(
    file: Path, dtype: torch.dtype | None, changes: Mapping[str, Any]
) -> None:
    if dtype is None and not changes:
        return
    config = json.loads(file.read_text())
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config | dict(changes), indent=2) + "\n")
