"""Kernels are launched on the device of their tensors, wherever the caller is."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import espo_kernels
from espo_kernels.triton_launches import launch

PACKAGE = Path(espo_kernels.__file__).parent


class TensorOnGpu:
    """A tensor with a known place and nothing else."""

    def __init__(self, device: int) -> None:
        self.device = device


class Cuda:
    """The current device of a process, as torch changes it."""

    def __init__(self) -> None:
        self.device = 0

    @contextmanager
    def device_of(self, tensor: TensorOnGpu) -> Iterator[None]:
        before = self.device
        self.device = tensor.device
        try:
            yield
        finally:
            self.device = before


class Kernel:
    """Records where it is launched."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            self.launches.append((self._cuda.device, grid, arguments[1:], options))

        return run


@pytest.mark.parametrize(("tensor", "place"), [(TensorOnGpu(1), 1), (TensorOnGpu(0), 0)])
def test_the_device_of_the_first_tensor_is_the_current_one_in_a_launch(
    tensor: Any, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "device_of", cuda.device_of)
    kernel = Kernel(cuda)
    launch(kernel, (3, 2), tensor, 7, BLOCK=4)
    assert kernel.launches == [(place, (3, 2), (7,), {"BLOCK": 4})]
    assert cuda.device == 0


def test_tensors_on_cpus_need_no_device() -> None:
    """Triton's interpreter runs kernels on them."""
    kernel = Kernel(Cuda())
    launch(kernel, (1,), torch.zeros(1))
    assert len(kernel.launches) == 1


def direct_launches(source: str) -> list[int]:
    """Lines of calls such as kernel[grid](...)."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]


def test_every_kernel_is_launched_through_the_one_function() -> None:
    assert direct_launches("some_kernel[(1,)](tensor)") == [1]
    places = {path.name: direct_launches(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name: len(lines) for name, lines in places.items() if lines} == {
        "triton_launches.py": 1
    }
