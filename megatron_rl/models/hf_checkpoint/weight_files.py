"""The safetensors files of a checkpoint directory: which holds what, and whether they are whole.
Reads no tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

Offset = Annotated[int, Meta(ge=0)]


class DamagedWeights(ValueError):
    """A file of the weights is missing, cut or something else; the message names the file."""


class _Index(msgspec.Struct):
    weight_map: Annotated[dict[str, str], Meta(min_length=1)]


class _Tensor(msgspec.Struct):
    data_offsets: tuple[
        Offset, Offset
    ]  # of its first byte and behind its last, from the end of the header

    def __post_init__(self) -> None:
        if self.data_offsets[0] > self.data_offsets[1]:
            raise ValueError(f"data_offsets {self.data_offsets}")


def weight_map(directory: Path) -> dict[str, str]:
    """The file of every tensor by its name. Raises `DamagedWeights`."""
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not whole.is_file():
            raise DamagedWeights(f"The directory holds no {whole.name} and no {index.name}")
        return dict.fromkeys(tensor_names(whole), whole.name)
    try:
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedWeights(
            f"{index.name} is not JSON with a weight_map from tensors to files ({error})"
        ) from error


def check_weight_files(directory: Path) -> None:
    """Compare index, headers and sizes of the files.

    Raises `DamagedWeights` for the first that does not fit.
    """
    names_by_file: dict[str, set[str]] = {}
    for name, file in weight_map(directory).items():
        names_by_file.setdefault(file, set()).add(name)
    for file, names in sorted(names_by_file.items()):
        if not (directory / file).is_file():
            raise DamagedWeights(f"model.safetensors.index.json names {file}, which is not there")
        missing = names - tensor_names(directory / file)
        if missing:
            raise DamagedWeights(
                f"{file} does not hold {min(missing)}, which model.safetensors.index.json places there"
            )


def tensor_names(file: Path) -> set[str]:
    """The tensors of a safetensors file: 8 bytes with the header's length, a JSON header, then the
    tensors' bytes.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:  # also of a file of another kind: do not read it whole
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
    expected = 8 + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != expected:
        raise DamagedWeights(f"{file.name} has {size} bytes, and its header describes {expected}")
    return set(tensors)
