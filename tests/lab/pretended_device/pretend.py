"""Makes this process believe that it has GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.lab.pretended_device.host_waits import HostWaits
from tests.lab.pretended_device.library import DeviceLibrary

if TYPE_CHECKING:
    from tests.lab.pretended_device.ipc import SharedMemory
    from tests.lab.pretended_device.torch_cuda import TorchCuda


@dataclass(frozen=True)
class PretendedDevice:
    """The device of this process.

    waits: how often the host waited for it. cuda: the calls of `torch.cuda`. handles: its memory
    that other threads map.
    """

    library: DeviceLibrary
    waits: HostWaits
    cuda: TorchCuda
    handles: SharedMemory


_devices: list[PretendedDevice] = []


def current() -> PretendedDevice:
    """Return the device of this process. Raises RuntimeError without one."""
    if not _devices:
        raise RuntimeError("this process has no pretended device: call pretend() first")
    return _devices[0]


def pretend() -> PretendedDevice:
    """Give this process eight CUDA devices. Call it before torch is imported.

    Raises `RehearsalUnavailable` without a C++ compiler, or if torch was imported already.
    """
    library = DeviceLibrary()
    from tests.lab.pretended_device.attention import (
        install_dense_attention,
        install_varlen_attention,
    )
    from tests.lab.pretended_device.ipc import SharedMemory
    from tests.lab.pretended_device.kernels import install_kernels
    from tests.lab.pretended_device.nccl import install_nccl
    from tests.lab.pretended_device.torch_cuda import TorchCuda

    waits = HostWaits()
    library.on_wait(waits.record)
    cuda = TorchCuda(library)
    cuda.install()
    handles = SharedMemory()
    handles.install()
    install_nccl()
    install_kernels()
    install_dense_attention()
    install_varlen_attention(waits)
    _leave_functions_uncompiled()
    device = PretendedDevice(library, waits, cuda, handles)
    _devices.append(device)
    return device


def _leave_functions_uncompiled() -> None:
    """Let `torch.compile` return functions unchanged: its code for a GPU cannot run here."""
    import torch

    def keep(function: Any = None, **_: Any) -> Any:
        return function if function is not None else keep

    library: Any = torch
    library.compile = keep
