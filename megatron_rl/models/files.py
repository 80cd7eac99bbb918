"""The start checkpoint: it exists, it is a Mixture-of-Experts model we can build, its weights' files are whole, and its
tokenizer belongs to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.config.refusal import Refusal
from megatron_rl.models.qwen3_moe import ModelConfigError, ModelShape, read_shape
from megatron_rl.models.tokenizer import Tokenizer, TokenizerError, check_matches_model


def inspect_model(path: str) -> tuple[ModelShape | None, list[Refusal]]:
    """The model's shape, None when it cannot be read, and what is wrong with the checkpoint."""
    directory = Path(path)
    if not directory.is_dir():
        rule = "There is no such directory"
        if directory.exists():
            rule = "It is a file, not a directory"
        remedy = "Give a local directory in Hugging Face format; nothing is downloaded from a hub"
        return None, [Refusal("model.path", path, rule, remedy)]
    try:
        shape = read_shape(directory)
    except ModelConfigError as error:
        return None, [Refusal.from_error("model.path", path, error)]
    return shape, [*_check_weights(directory), *_check_tokenizer(directory, shape)]


class _Damaged(ValueError):
    """A file of the weights is missing, cut or something else."""


def _check_weights(directory: Path) -> list[Refusal]:
    """At most one refusal: a copy that broke off has many damaged files, and one says it."""
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            _check_shards(directory, _names_by_shard(index))
        elif whole.is_file():
            _tensor_names(whole)
        else:
            rule = "The directory holds no model.safetensors and no model.safetensors.index.json"
            return [Refusal("model.path", str(directory), rule, "Convert the weights with save_pretrained")]
    except _Damaged as error:
        return [Refusal("model.path", str(directory), str(error), "Copy or download it again")]
    return []


def _names_by_shard(index: Path) -> dict[str, set[str]]:
    try:
        content = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _Damaged(f"{index.name} is not JSON ({error})") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise _Damaged(f"{index.name} has no weight_map from names of tensors to files")
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, set()).add(name)
    return names


def _check_shards(directory: Path, names_by_shard: dict[str, set[str]]) -> None:
    for file, names in sorted(names_by_shard.items()):
        if not (directory / file).is_file():
            raise _Damaged(f"model.safetensors.index.json names {file}, which is not there")
        missing = names - _tensor_names(directory / file)
        if missing:
            raise _Damaged(f"{file} does not hold {min(missing)}, which model.safetensors.index.json places there")


def _tensor_names(file: Path) -> set[str]:
    """The tensors of a safetensors file: 8 bytes with the header's length, a JSON header, then the tensors' bytes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:  # also of a file of another kind: do not read it whole
                raise _Damaged(f"{file.name} has {size} bytes, and no safetensors header fits")
            header = json.loads(stream.read(length))
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        expected = 8 + length + max((_end(value) for value in tensors.values()), default=0)
    except _Damaged:
        raise
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise _Damaged(f"{file.name} has no safetensors header ({type(error).__name__}: {error})") from error
    if size != expected:
        raise _Damaged(f"{file.name} has {size} bytes, and its header describes {expected}")
    return set(tensors)


def _end(tensor: dict[str, Any]) -> int:
    """The offset behind a tensor's last byte, from the end of the header."""
    begin, end = tensor["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin}, {end}")
    return int(end)


def _check_tokenizer(directory: Path, shape: ModelShape) -> list[Refusal]:
    try:
        tokenizer = Tokenizer.from_directory(directory)
        check_matches_model(tokenizer, vocab_size=shape.vocab_size, eos_ids=shape.eos_token_ids)
    except TokenizerError as error:
        return [Refusal.from_error("model.path", str(directory), error)]
    return []
