"""Every random generator of a rank continues after a resume as it would have without one."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from megatron_rl.mcore.checkpoint import load_random_state, random_state


def draw() -> list[Any]:
    """Draw from every generator, normal numbers an odd number of times: two are drawn at once."""
    with get_cuda_rng_tracker().fork():
        model_numbers = torch.rand(3).tolist()
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        model_numbers,
    ]


@pytest.mark.parametrize("num_draws", [0, 1])
def test_random_numbers_continue_after_a_resume(
    megatron: Any, tmp_path: Path, num_draws: int
) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    for _ in range(num_draws):
        draw()
    (tmp_path / "state").write_bytes(random_state())
    numbers = [draw(), draw()]
    load_random_state(tmp_path / "state")
    assert [draw(), draw()] == numbers


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_a_state_of_another_length_is_refused(megatron: Any, tmp_path: Path, name: str) -> None:
    file = tmp_path / "state"
    file.write_bytes(random_state())
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:-1].clone()}, file)
    with pytest.raises(ValueError, match=r"is not a file of random states: .*another length"):
        load_random_state(file)


def test_a_file_of_something_else_is_refused(megatron: Any, tmp_path: Path) -> None:
    file = tmp_path / "state"
    save_file({"weight": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="state is not a file of random states"):
        load_random_state(file)
    file.write_bytes(b"{}")
    with pytest.raises(ValueError, match="state is not a file of random states"):
        load_random_state(file)
