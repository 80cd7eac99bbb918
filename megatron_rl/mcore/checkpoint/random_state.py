"""The state of a rank's random numbers, as plain numbers in a safetensors file."""

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
_WORDS, _NUMPY_WORDS = 625, 624  # of the Mersenne twister's state


def random_state_file(checkpoint: Path, rank: int) -> Path:
    """Where a rank's numbers lie in a checkpoint."""
    return checkpoint / "rng" / f"rank-{rank:05d}.safetensors"


def random_state() -> bytes:
    """Python's, numpy's, torch's and Megatron's generators, as the bytes of a file."""
    _, words, gauss = random.getstate()
    _, numpy_words, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(numpy_words).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    tensors |= {
        _TRACKER + name: state.cpu() for name, state in tracked.items() if torch.is_tensor(state)
    }
    return save({name: tensor.clone().contiguous() for name, tensor in tensors.items()})


def load_random_state(file: Path) -> None:
    """Put every generator where it was. Raises ValueError for a file that holds something else."""
    try:
        found = load_file(file)
        words, gauss = found["python"].tolist(), found["python_gauss"].tolist()
        if len(words) != _WORDS or len(found["numpy"]) != _NUMPY_WORDS:
            raise ValueError("a generator's state has another length")
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"{file} is not the state of random numbers: {error}") from error
    random.setstate((3, tuple(words), gauss[0] if gauss else None))
    position, has_gauss = found["numpy_position"].tolist()
    state: Any = (
        "MT19937",
        found["numpy"].numpy().astype(np.uint32),
        position,
        has_gauss,
        found["numpy_gauss"].item(),
    )
    np.random.set_state(state)
    torch.set_rng_state(found["torch"])
    if torch.cuda.is_available() and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"])
    tracker = get_cuda_rng_tracker()
    known = tracker.get_states()
    tracker.set_states(
        known | {name: found[_TRACKER + name] for name in known if _TRACKER + name in found}
    )
