"""Engines that fetch weights with the code of checkpoint-engine, without a GPU.

Their memory is the trainer's, because both are threads of one process.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import create_keys

Load = Callable[[list[tuple[str, torch.Tensor]]], None]

_tensors: dict[int, torch.Tensor] = {}
_numbers = itertools.count()


def share(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Make a handle of a tensor with as many values as one of CUDA, the seventh its device."""
    number = next(_numbers)
    _tensors[number] = tensor
    return open_shared, (number, *[None] * 5, 0)


def open_shared(number: int, *_: object) -> torch.Tensor:
    """Return the tensor of a handle."""
    return _tensors[number]


class NoDevice:
    """Stands for `torch.cuda` in checkpoint-engine. calls: the names of its functions."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device_module = self

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


def receiver() -> Any:
    """Return checkpoint-engine's receiver, or a copy of its protocol without the package."""
    if importlib.util.find_spec("checkpoint_engine") is None:
        return importlib.import_module("tests.support.ipc_protocol")
    return importlib.import_module("checkpoint_engine.worker")


def receiver_without_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `receiver()` with a device that is none."""
    worker = receiver()
    monkeypatch.setattr(worker, "DeviceManager", NoDevice)
    # It collects the garbage of the whole process, here the tests' own
    monkeypatch.setattr(worker, "gc", types.SimpleNamespace(collect=lambda: None))
    return worker


class ReceivingAdmin(AdminClient):
    """The control client of an engine whose ranks are threads.

    load: stands for the model's `load_weights`. post_hook: for the end of an update. weights: what
    each rank has loaded, by the name of its device.
    """

    def __init__(
        self, worker: Any, engine: Engine, load: Load | None = None, post_hook: Any = None
    ) -> None:
        super().__init__(engine, create_keys())
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        self.requests: list[dict[str, str]] = []
        self._worker = worker
        self._load = load
        self._post_hook = post_hook

    def update_weights_from_ipc(self, addresses: Mapping[str, str], *, timeout: float) -> None:
        import zmq

        self.requests.append(dict(addresses))
        errors: list[BaseException] = []
        context = zmq.Context()

        def run(device: str, address: str) -> None:
            weights = self.weights.setdefault(device, {})

            def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
                if self._load is not None:
                    self._load(tensors)
                weights.update((name, tensor.clone()) for name, tensor in tensors)

            try:
                self._worker.update_weights_from_ipc(
                    context, address, 0, run=load, post_hook=self._post_hook
                )
            except BaseException as error:  # the main thread raises it
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=item, daemon=True) for item in addresses.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        # It leaves its socket open if it cannot map the memory
        context.destroy(linger=0)
        if errors:
            raise RequestFailed(f"{self.url}/update_weights_from_ipc failed: {errors[0]}")


def weights_of(num_tensors: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of 16 to 64 values."""
    for index in range(num_tensors):
        yield f"layers.{index}.weight", torch.full((4, 4 * (index % 4 + 1)), index, dtype=dtype)
