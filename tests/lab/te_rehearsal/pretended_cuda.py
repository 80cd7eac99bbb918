"""Lets Megatron and Transformer Engine take CPU tensors for tensors of a GPU.

It changes torch for the whole process, which does nothing but rehearse.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

# Read when triton and torch are imported. Triton's kernels are interpreted on CPU tensors.
_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "NVTE_TORCH_COMPILE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
os.environ.update(_ENVIRONMENT)

import torch

from tests.lab.te_rehearsal.compiled.optimizer_steps import provide_apex_accumulation

HOPPER = (9, 0)
BLACKWELL = (10, 0)


class PretendedCuda:
    """Switches the answers of torch about CUDA. One object a process.

    Attributes:
    capability: CUDA's compute capability of the GPU that torch reports.
    is_on: False while torch reports no GPU.
    """

    def __init__(self) -> None:
        self.capability = HOPPER
        self.is_on = True
        cuda: Any = torch.cuda
        cuda.is_available = lambda: self.is_on
        cuda.device_count = lambda: int(self.is_on)
        cuda.get_device_capability = lambda *_: self.capability
        cuda.get_device_properties = lambda *_: self._properties()
        cuda.get_device_name = lambda *_: "pretended"
        cuda.is_current_stream_capturing = lambda: False
        cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
        provide_apex_accumulation()
        from megatron_rl.mcore import compat, gpu_libraries

        libraries: Any = gpu_libraries
        libraries.kernel_error = lambda: ""  # stand-ins replace the kernels later
        compat.install()  # the branch for GPUs
        from megatron_rl.mcore import seams
        from megatron_rl.mcore.cpu.torch_cuda import patch_torch_cuda, patch_torch_factories

        patch_torch_cuda()
        patch_torch_factories()
        seams.replace_cuda_functions()
        cuda.device_count = lambda: int(self.is_on)
        tensor: Any = torch.Tensor
        tensor.is_cuda = property(lambda _: self.is_on)
        tensor.to = _to_cpu(tensor.to)
        from tests.lab.te_rehearsal.triton_interpreter import patch_interpreter

        patch_interpreter()

    def become(self, capability: tuple[int, int]) -> None:
        """Report a GPU of another generation, and drop what Transformer Engine found out."""
        from transformer_engine.pytorch import quantization, utils

        self.capability = capability
        for module in (quantization, utils):
            for name, value in list(vars(module).items()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
                elif name.endswith("_SUPPORT"):  # such as _MXFP8_SUPPORT
                    setattr(module, name, None)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Answer as a machine without a GPU does, so that `local` runs as on CPUs."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    def _properties(self) -> Any:
        return type(
            "Properties",
            (),
            {
                "name": "pretended",
                "major": self.capability[0],
                "minor": self.capability[1],
                "total_memory": 80 * 2**30,
                "multi_processor_count": 132,
                "warp_size": 32,
            },
        )


def _to_cpu(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.Tensor.to`, so that tensors that move to CUDA stay on the CPU."""

    def convert_on_cpu(tensor: Any, *args: Any, **options: Any) -> Any:
        places = [_without_cuda(value) for value in args]
        return convert(tensor, *places, **{k: _without_cuda(v) for k, v in options.items()})

    return convert_on_cpu


def _without_cuda(value: Any) -> Any:
    is_cuda = str(value).startswith("cuda") if isinstance(value, str | torch.device) else False
    return "cpu" if is_cuda else value
