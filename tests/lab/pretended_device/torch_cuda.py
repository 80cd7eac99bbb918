"""Answers `torch.cuda`'s functions for the pretended device, and records their calls."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

from launch.rehearsal.gpus import GPUS, Gpu
from tests.lab.pretended_device.library import DeviceLibrary

NUM_DEVICES = 8
_NCCL_VERSION = (2, 27, 5)


class TorchCuda:
    """`torch.cuda` of a machine with eight GPUs of one kind.

    calls: how often each function was called, by name.
    """

    def __init__(self, library: DeviceLibrary, gpu: Gpu = GPUS["h100"]) -> None:
        self.calls: Counter[str] = Counter()
        self._library = library
        self._gpu = gpu

    def install(self) -> None:
        """Replace the functions of `torch.cuda` in this process."""
        cuda: Any = torch.cuda
        vars(cuda)["_initialized"] = True
        cuda._lazy_init = lambda: None
        cuda.default_generators = tuple(
            torch.ops.pretended_device.default_generator(index) for index in range(NUM_DEVICES)
        )
        for name, function in self._functions().items():
            setattr(cuda, name, self._counting(name, function))
        cuda.stream = self._stream
        cuda.Stream = self._stream_class("Stream")
        cuda.Event = self._event_class()
        cuda.is_available = lambda: True
        cuda.is_initialized = lambda: True
        cuda.device_count = lambda: NUM_DEVICES
        cuda.nccl.version = lambda: _NCCL_VERSION
        extension: Any = torch._C
        extension._cuda_getDevice = lambda: self._library.current_device
        extension._cuda_setDevice = self._library.set_device

    def _functions(self) -> dict[str, Callable[..., Any]]:
        library = self._library
        gpu = self._gpu
        idle = self._stream_class("current_stream")()
        nothing = ("empty_cache", "set_stream", "ipc_collect", "reset_accumulated_memory_stats")
        functions: dict[str, Callable[..., Any]] = {name: lambda *_: None for name in nothing}
        return functions | {
            "set_device": lambda device: library.set_device(_index(device)),
            "synchronize": lambda *_: library.wait("cuda.synchronize"),
            "current_stream": lambda *_: idle,
            "default_stream": lambda *_: idle,
            "memory_allocated": lambda *_: library.allocated_bytes,
            "memory_reserved": lambda *_: library.allocated_bytes,
            "max_memory_allocated": lambda *_: library.peak_bytes,
            "max_memory_reserved": lambda *_: library.peak_bytes,
            "reset_peak_memory_stats": lambda *_: library.reset_peak(),
            "mem_get_info": lambda *_: (gpu.memory - library.allocated_bytes, gpu.memory),
            "get_device_capability": lambda *_: gpu.capability,
            "get_device_name": lambda *_: f"pretended {gpu.name}",
            "get_device_properties": lambda device=None, *_: _properties(gpu, _index(device or 0)),
            "is_bf16_supported": lambda *_, **__: True,
        }

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(getattr(torch.cuda, name))
        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **options)

        return call

    @contextlib.contextmanager
    def _stream(self, _: Any) -> Iterator[None]:
        self.calls["stream"] += 1
        yield

    def _stream_class(self, name: str) -> Any:
        calls = self.calls
        library = self._library

        class Stream(_Stream):
            def __init__(self, *_: Any, **__: Any) -> None:
                calls[name] += 1
                self.device = torch.device("cuda", library.current_device)

            def synchronize(self) -> None:
                calls["Stream.synchronize"] += 1
                library.wait("Stream.synchronize")

            def wait_stream(self, _: Any) -> None:
                calls["Stream.wait_stream"] += 1

            def wait_event(self, _: Any) -> None:
                calls["Stream.wait_event"] += 1

            def record_event(self, event: Any = None) -> Any:
                calls["Stream.record_event"] += 1
                return torch.cuda.Event() if event is None else event

        return Stream

    def _event_class(self) -> Any:
        calls = self.calls
        library = self._library

        class Event:
            """An event that happens when the host asks for it."""

            def __init__(self, *_: Any, **__: Any) -> None:
                calls["Event"] += 1

            def record(self, *_: Any) -> None:
                calls["Event.record"] += 1

            def wait(self, *_: Any) -> None:
                calls["Event.wait"] += 1

            def query(self) -> bool:
                library.finish_copies()
                return True

            def synchronize(self) -> None:
                calls["Event.synchronize"] += 1
                library.wait("Event.synchronize")

            def elapsed_time(self, _: Any) -> float:
                return 0.0

        return Event


class _Stream:
    """The only stream of the device, in which everything runs in order."""

    stream_id = 0
    device_type = 1
    cuda_stream = 0

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return 0 if index is None else int(index)


def _properties(gpu: Gpu, index: int) -> Any:
    values = {
        "name": f"pretended {gpu.name}",
        "major": gpu.capability[0],
        "minor": gpu.capability[1],
        "total_memory": gpu.memory,
        "multi_processor_count": gpu.processors,
        "warp_size": 32,
        "uuid": f"00000000-0000-0000-0000-{index:012}",
    }
    return type("Properties", (), values)
