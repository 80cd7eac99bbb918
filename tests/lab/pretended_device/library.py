"""Loads the pretended device into this process, before torch is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from launch.rehearsal.cuda_guard import load_library

_SOURCE = Path(__file__).with_name("pretended_device.cpp")
_WaitCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


class DeviceLibrary:
    """The device as its C++ library offers it.

    Compiles the library once for each version of torch, in about half a minute. Raises
    `RehearsalUnavailable` without a C++ compiler, or if torch was imported already.
    """

    def __init__(self) -> None:
        self._library = load_library(_SOURCE)
        self._library.pretended_allocated.restype = ctypes.c_int64
        self._library.pretended_peak.restype = ctypes.c_int64
        self._callback: object = None
        for name in _operations_with_host_numbers():
            self._library.pretended_takes_host_numbers(name.encode())

    def on_wait(self, function: Callable[[bytes, bytes], None]) -> None:
        """Call a function with kind and operation when the host waits for the device."""
        self._callback = _WaitCallback(function)
        self._library.pretended_on_wait(self._callback)

    def wait(self, operation: str) -> None:
        """Let the host wait for the device."""
        self._library.pretended_wait(b"synchronize", operation.encode())

    def finish_copies(self) -> None:
        """Finish copies whose end the host knows without waiting."""
        self._library.pretended_finish_copies()

    @property
    def current_device(self) -> int:
        return int(self._library.pretended_current_device())

    def set_device(self, index: int) -> None:
        self._library.pretended_set_device(index)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the device's tensors that live."""
        return int(self._library.pretended_allocated())

    @property
    def peak_bytes(self) -> int:
        """The most bytes since `reset_peak`."""
        return int(self._library.pretended_peak())

    def reset_peak(self) -> None:
        self._library.pretended_reset_peak()


def _operations_with_host_numbers() -> list[str]:
    """Names of the operations for which CUDA takes host tensors of one number, with overloads.

    torch declares that it does not compare the devices of their arguments: the kernels do, and they
    read such a tensor as a number.
    """
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    declarations = re.split(r"^- func: ", file.read_text(), flags=re.MULTILINE)[1:]
    return [
        "aten::" + declaration.partition("(")[0]
        for declaration in declarations
        if re.search(r"^  device_check: NoCheck", declaration, flags=re.MULTILINE)
    ]
