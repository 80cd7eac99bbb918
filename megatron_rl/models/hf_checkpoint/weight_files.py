"""Checks the safetensors files of a checkpoint directory by their headers. Reads no tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

Offset = Annotated[int, Meta(ge=0)]

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_LENGTH_BYTES = 8  # of the header's length, at the start of a safetensors file


class DamagedWeights(ValueError):
    """A weight file is missing, truncated or no safetensors file. The message names it."""


class _Index(msgspec.Struct):
    weight_map: Annotated[dict[str, str], Meta(min_length=1)]


class _Tensor(msgspec.Struct):
    """Entry of a header.

    data_offsets: first byte of the tensor and end of its bytes, counted from the header's end.
    """

    data_offsets: tuple[Offset, Offset]

    def __post_init__(self) -> None:
        if self.data_offsets[0] > self.data_offsets[1]:
            raise ValueError(f"data_offsets {self.data_offsets}")


def weight_map(directory: Path) -> dict[str, str]:
    """Return the file name of every tensor. Raises `DamagedWeights`."""
    index = directory / _INDEX
    single_file = directory / _SINGLE_FILE
    if not index.is_file():
        if not single_file.is_file():
            raise DamagedWeights(f"The directory holds no {_SINGLE_FILE} and no {_INDEX}")
        return dict.fromkeys(tensor_names(single_file), _SINGLE_FILE)
    try:
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedWeights(
            f"{_INDEX} is not JSON with a weight_map from tensors to files ({error})"
        ) from error


def check_weight_files(directory: Path) -> None:
    """Compare index, headers and sizes of the files.

    Raises `DamagedWeights` for the first mismatch.
    """
    names_by_file: dict[str, set[str]] = {}
    for name, file in weight_map(directory).items():
        names_by_file.setdefault(file, set()).add(name)
    for file, names in sorted(names_by_file.items()):
        if not (directory / file).is_file():
            raise DamagedWeights(f"{_INDEX} names {file}, which is missing")
        missing = names - tensor_names(directory / file)
        if missing:
            raise DamagedWeights(f"{file} does not hold {min(missing)}, although {_INDEX} says so")


def tensor_names(file: Path) -> set[str]:
    """Return the names of a safetensors file's tensors, after checking the file's size.

    The file holds 8 bytes with the header's length, a JSON header and the tensors' bytes.
    Raises `DamagedWeights`.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            # In a file of another kind these bytes are a huge number. Do not read so much.
            if length > size - _LENGTH_BYTES:
                raise DamagedWeights(
                    f"{file.name} has {size} bytes, and no safetensors header fits"
                )
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in header.items()}
    except DamagedWeights:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedWeights(f"{file.name} has no safetensors header ({error})") from error
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    header_size = _LENGTH_BYTES + length + end
    if size != header_size:
        raise DamagedWeights(
            f"{file.name} has {size} bytes, and its header describes {header_size}"
        )
    return set(tensors)


def tensor_bytes(file: Path) -> int:
    """Return the size of a safetensors file's tensors in bytes, without its header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    return file.stat().st_size - _LENGTH_BYTES - length
