"""Reads the tensors of a checkpoint in Hugging Face format."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.hf_checkpoint.weight_files import DamagedWeights, weight_map

# Other dtypes need scales, which are not read.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointReader:
    """Reads tensors of a checkpoint directory. A context manager that keeps its files open.

    key: setting that names the directory, for messages.

    Raises `Failure`.
    """

    def __init__(self, directory: Path, key: str = "model.path") -> None:
        self._directory = directory
        self._name = f"{key}={str(directory)!r}"
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        try:
            self._file_of = weight_map(directory)
        except DamagedWeights as error:
            raise self._unusable(str(error)) from error

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of their files."""
        return sorted(self._file_of, key=lambda name: (self._file_of[name], name))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name, without reading a tensor."""
        return {
            name: tuple(self._open_file(name).get_slice(name).get_shape()) for name in self.names
        }

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in the checkpoint's dtype, after checking that it is finite."""
        file = self._open_file(name)
        try:
            tensor = file.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise self._unreadable(name, error) from error
        if tensor.dtype not in _DTYPES:
            raise Failure(
                f"{self._name}: tensor {name} is {tensor.dtype}; weights must be float32, "
                "bfloat16 or float16, because scales of quantized weights are not read. "
                "Use the bf16 checkpoint",
                ExitCode.BAD_DATA,
            )
        # If a value is NaN, minimum and maximum are both NaN.
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise self._unusable(f"tensor {name} of {self._file_of[name]} holds NaN or Inf")
        return tensor

    def _open_file(self, name: str) -> Any:
        """Open the file of a tensor, unless it is open."""
        if name not in self._file_of:
            raise self._unusable(f"tensor {name} is missing")
        file = self._file_of[name]
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(
                    safe_open(self._directory / file, framework="pt")
                )
        except (OSError, ValueError, SafetensorError) as error:
            raise self._unreadable(name, error) from error
        return self._files[file]

    def _unreadable(self, name: str, error: Exception) -> Failure:
        return self._unusable(f"tensor {name} of {self._file_of[name]} cannot be read ({error})")

    def _unusable(self, rule: str) -> Failure:
        text = f"{self._name}: {rule}. Copy or download the checkpoint again"
        return Failure(text, ExitCode.BAD_DATA)
