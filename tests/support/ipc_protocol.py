"""The receiving side of checkpoint-engine's protocol, as its `worker.py` (0.4.2) has it.

It stands in where the package is not installed, and without CUDA.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch
import zmq


class _Host:
    """The functions of a device, for memory of the host."""

    def synchronize(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def empty_cache(self) -> None: ...


class DeviceManager:
    """Knows the functions of the device."""

    device_module: Any = torch.cuda if torch.cuda.is_available() else _Host()


def _rebuild_ipc(handle: tuple[Any, tuple[Any, ...]], device_id: int) -> torch.Tensor:
    function, values = handle
    arguments = list(values)
    arguments[6] = device_id
    buffer: torch.Tensor = function(*arguments)
    return buffer


def _weights_in(items: list[dict[str, Any]], buffer: torch.Tensor) -> list[tuple[str, Any]]:
    weights = []
    for item in items:
        shape = torch.Size(item["shape"])
        end = item["offset"] + item["dtype"].itemsize * shape.numel()
        flat = buffer[item["offset"] : end]
        weights.append((item["name"], flat.view(item["dtype"]).view(shape)))
    return weights


def _describe(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def update_weights_from_ipc(
    context: zmq.Context[Any],
    address: str,
    device_id: int,
    *,
    run: Callable[[list[tuple[str, torch.Tensor]]], None],
    post_hook: Callable[[], None] | None = None,
) -> None:
    """Map the sender's memory, and load each bucket in it."""
    socket = context.socket(zmq.REP)
    socket.connect(address)
    device = DeviceManager().device_module
    try:
        buffer = _rebuild_ipc(socket.recv_pyobj(), device_id)
        assert buffer.dtype == torch.uint8
        socket.send(b"")
    except Exception as error:
        socket.send_string(_describe(error))
        socket.recv()
        raise
    try:
        while (message := socket.recv_pyobj()) is not None:
            if isinstance(message, Exception):
                raise message
            try:
                run(_weights_in(message, buffer))
                device.synchronize()
                socket.send(b"")
            except Exception as error:
                socket.send_string(_describe(error))
        del buffer
        gc.collect()
        device.ipc_collect()
        device.empty_cache()
        socket.send(b"")
        assert socket.recv_pyobj() is None
        if post_hook is not None:
            post_hook()
        device.synchronize()
        socket.send(b"")
    finally:
        socket.close()
