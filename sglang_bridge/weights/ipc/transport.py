"""Sends weights to engines that share the devices of the trainer's ranks."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError, RequestFailed
from sglang_bridge.weights.buckets import Bucket, NamedTensors, iterate_buckets
from sglang_bridge.weights.calls import TOO_LATE, Failures, start_call
from sglang_bridge.weights.crew import Crew, SendReport
from sglang_bridge.weights.ipc.handover import Handover, Share


class _Endpoint(msgspec.Struct, frozen=True):
    """The place where a rank hands over weights.

    node, gpu: the place of its device, as in `Engine`. device: its name in the protocol. problem:
    why the rank cannot, empty if it can.
    """

    node: int
    gpu: int
    device: str = ""
    address: str = ""
    problem: str = ""


def device_name(device: torch.device) -> str:
    """The name of a GPU in the protocol, the same in every process: GPU- and its UUID."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class IpcTransport:
    """Hands this rank's device memory to the engine rank on the same device. Needs CUDA.

    Every rank must stream all tensors (`WeightSource.stream_everywhere`), and call `connect`, which
    is a collective. One bucket of device memory is mapped by both processes during an update. The
    sockets lie in a directory that only this user can enter, because engines unpickle what arrives.

    An engine gets no session: it loads in place, and takes no requests before the updater resumes
    it. SGLang hides errors of the last part of an update, so audit each one.

    crew: all ranks. node, gpu: the place of this rank's device. name_device, share: of the device,
    for the protocol. log: writes a line about a long wait.
    """

    def __init__(
        self,
        *,
        crew: Crew,
        node: int,
        gpu: int,
        device: torch.device,
        timeout_seconds: float,
        log: Callable[[str], None] = print,
        name_device: Callable[[torch.device], str] = device_name,
        share: Share = reduce_tensor,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._crew = crew
        self._node = node
        self._gpu = gpu
        self._device = device
        self._log = log
        self._name_device = name_device
        self._share = share
        self._context = zmq.Context()
        self._directory = Path(tempfile.mkdtemp(prefix="weights-"))
        self._num_updates = 0
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoints: list[_Endpoint] = []
        # Rank 0 only: the request of each engine, which lasts until it has the weights
        self._replies: dict[str, Future[None]] = {}

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        """Bind a socket for the next update, and learn the sockets of all ranks. A collective."""
        self._num_updates += 1
        data = msgspec.msgpack.encode(self._bind())
        parts = self._crew.gather(data)
        self._endpoints = [msgspec.msgpack.decode(part, type=_Endpoint) for part in parts]
        failures: Failures = {}
        for admin in admins:
            if problem := self._problem(admin.engine):
                failures[admin.url] = problem
        return failures

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Ask every engine to fetch the weights. Rank 0 only."""
        self._replies = {
            admin.url: start_call(
                partial(
                    admin.update_weights_from_ipc,
                    self._addresses(admin.engine),
                    timeout=max(deadline - time.monotonic(), 1.0),
                )
            )
            for admin in admins
        }
        return {}

    def send(
        self,
        tensors: NamedTensors,
        admins: Sequence[AdminClient],
        version: int,
        *,
        bucket_bytes: int,
        deadline: float,
    ) -> SendReport:
        """Hand all tensors to the rank of an engine on this device, if it is among `admins`."""
        neighbour = next((admin for admin in admins if self._shares_device(admin.engine)), None)
        if neighbour is None or self._socket is None:
            return SendReport(num_tensors=sum(1 for _ in tensors), failures=self._refusals())
        handover = Handover(
            self._socket,
            deadline,
            refusal=partial(self._refusal, neighbour.url),
            log=self._log,
            share=self._share,
        )
        run = _Run(handover, self._device)
        try:
            run.hand_over(tensors, bucket_bytes)
        except BaseException as error:
            handover.cancel(f"the trainer's weights ended: {error}")
            raise
        finally:
            self._unbind()
        failures = self._refusals()
        if run.failure:
            failures[neighbour.url] = run.failure
        return SendReport(
            num_tensors=run.num_tensors,
            failures=failures,
            bytes_sent={neighbour.url: run.num_bytes},
            seconds={"send": run.send_seconds, "load": run.load_seconds},
        )

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        """Wait for the engines' answers. Rank 0 only."""
        failures: Failures = {}
        for admin in admins:
            try:
                self._replies[admin.url].result(max(deadline - time.monotonic(), 0.0))
            except TimeoutError:
                failures[admin.url] = TOO_LATE
            except (EngineError, ValueError, OSError) as error:
                failures[admin.url] = str(error)
        return failures

    def forget(self, admin: AdminClient) -> None:
        """Do nothing: the next update has other sockets."""

    def close(self) -> None:
        """Remove the sockets."""
        self._unbind()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _bind(self) -> _Endpoint:
        self._unbind()
        endpoint = _Endpoint(self._node, self._gpu)
        address = f"ipc://{self._directory}/{self._num_updates}"
        try:
            device = self._name_device(self._device)
            socket = self._context.socket(zmq.REQ)
            socket.setsockopt(zmq.LINGER, 0)
            self._socket = socket
            socket.bind(address)
        except (OSError, RuntimeError, zmq.ZMQError) as error:
            self._unbind()
            problem = f"rank {self._crew.rank} cannot hand over weights at {address}: {error}"
            return msgspec.structs.replace(endpoint, problem=problem)
        return msgspec.structs.replace(endpoint, device=device, address=address)

    def _unbind(self) -> None:
        if self._socket is not None:
            # Time for a last message, which tells the engine of a failure
            self._socket.close(linger=1000)
            self._socket = None

    def _endpoints_of(self, engine: Engine) -> list[_Endpoint]:
        places = {(engine.node, gpu) for gpu in engine.gpus}
        return [part for part in self._endpoints if (part.node, part.gpu) in places]

    def _addresses(self, engine: Engine) -> Mapping[str, str]:
        """The sockets of an engine's ranks by device."""
        return {part.device: part.address for part in self._endpoints_of(engine)}

    def _problem(self, engine: Engine) -> str:
        """Return why an engine cannot get weights, empty if it can."""
        endpoints = self._endpoints_of(engine)
        if not engine.gpus or len(endpoints) != engine.tp:
            return (
                f"engine.colocated=true: {len(endpoints)} rank(s) of the trainer are on the "
                f"{engine.tp} device(s) of this engine, {list(engine.gpus)} of node {engine.node}"
            )
        return "; ".join(part.problem for part in endpoints if part.problem)

    def _shares_device(self, engine: Engine) -> bool:
        return engine.node == self._node and self._gpu in engine.gpus

    def _refusal(self, url: str) -> str | None:
        """Return why an engine refused to fetch the weights, as far as this rank knows."""
        reply = self._replies.get(url)
        error = reply.exception() if reply is not None and reply.done() else None
        return None if error is None else str(error)

    def _refusals(self) -> Failures:
        refusals = {url: self._refusal(url) for url in self._replies}
        return {url: reason for url, reason in refusals.items() if reason is not None}


class _Run:
    """One rank's part of an update. failure: why the engine has not got everything, or empty."""

    def __init__(self, handover: Handover, device: torch.device) -> None:
        self.failure = ""
        self.num_tensors = 0
        self.num_bytes = 0
        self.send_seconds = 0.0
        self.load_seconds = 0.0
        self._handover = handover
        self._device = device
        self._is_open = False

    def hand_over(self, tensors: NamedTensors, bucket_bytes: int) -> None:
        """Hand over all tensors. After a failure it still exhausts them: a collective."""
        for bucket in iterate_buckets(tensors, bucket_bytes=bucket_bytes, device=self._device):
            self.num_tensors += len(bucket.names)
            if self.failure:
                continue
            assert bucket.slot is not None
            memory = bucket.slot.memory()
            if bucket.flat.data_ptr() != memory.data_ptr():
                raise ValueError(
                    f"weight {bucket.names[0]}: {bucket.flat.numel()} bytes do not fit into the "
                    f"{bucket_bytes} bytes that the engine maps"
                )
            self._attempt(partial(self._load, bucket, memory))
        if not self.failure and self._is_open:
            self._attempt(self._handover.finish)

    def _load(self, bucket: Bucket, memory: torch.Tensor) -> None:
        start = time.monotonic()
        if not self._is_open:
            self._handover.open(memory)
            self._is_open = True
        if self._device.type == "cuda":
            # The engine reads on a stream of its own
            torch.cuda.synchronize(self._device)
        loading = time.monotonic()
        self._handover.load(bucket)
        self.num_bytes += bucket.flat.numel()
        self.send_seconds += loading - start
        self.load_seconds += time.monotonic() - loading

    def _attempt(self, function: Callable[[], None]) -> None:
        try:
            function()
        except RequestFailed as error:
            self.failure = str(error)
            self._handover.cancel(self.failure)
