"""Saves and restores a rank's random generators, as tensors in a safetensors file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save

_TRACKER = "megatron/"
# The length of the Mersenne twister's state in Python, which includes the position, and in numpy.
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


def random_state_file(checkpoint: Path, rank: int) -> Path:
    """Return the file of a rank's random state in a checkpoint."""
    return checkpoint / "rng" / f"rank-{rank:05d}.safetensors"


def random_state() -> bytes:
    """Return the states of Python's, numpy's, torch's and Megatron's generators as a file."""
    tensors = _python_state() | _numpy_state()
    tensors["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        if torch.is_tensor(state):
            tensors[_TRACKER + name] = state.cpu()
    return save({name: tensor.clone().contiguous() for name, tensor in tensors.items()})


def load_random_state(file: Path) -> None:
    """Restore every generator. Raises ValueError if the file is no random state."""
    try:
        tensors = load_file(file)
        words = tensors["python"].tolist()
        gauss = tensors["python_gauss"].tolist()
        if len(words) != _PYTHON_WORDS or len(tensors["numpy"]) != _NUMPY_WORDS:
            raise ValueError("a generator's state has another length")
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"{file} is not a file of random states: {error}") from error
    random.setstate((3, tuple(words), gauss[0] if gauss else None))
    _load_numpy_state(tensors)
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    saved_states = {name: tensors[_TRACKER + name] for name in states if _TRACKER + name in tensors}
    tracker.set_states(states | saved_states)


def _python_state() -> dict[str, torch.Tensor]:
    _, words, gauss = random.getstate()
    return {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }


def _numpy_state() -> dict[str, torch.Tensor]:
    _, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
    }


def _load_numpy_state(tensors: dict[str, torch.Tensor]) -> None:
    position, has_gauss = tensors["numpy_position"].tolist()
    state: Any = (
        "MT19937",
        tensors["numpy"].numpy().astype(np.uint32),
        position,
        has_gauss,
        tensors["numpy_gauss"].item(),
    )
    np.random.set_state(state)
