"""Steps of a rank and an engine that share a pretended device, and the record of who did what."""

from __future__ import annotations

import threading
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import zmq

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.engines.engines import _memory_fraction
from megatron_rl.engines.members import Members
from megatron_rl.engines.weight_sync import WeightSync, open_weight_sync
from megatron_rl.training.worker import Worker
from sglang_bridge.engine import Engine
from sglang_bridge.keys import create_keys
from tests.lab.pretended_device.engine_peer import Peer, make_handler
from tests.lab.pretended_device.pretend import current
from tests.support.ipc_receiver import receiver

_SHORT_NAMES = {
    "/pause_generation": "pause",
    "/continue_generation": "continue",
    "/flush_cache": "flush",
    "/weights_checker": "audit",
}


class SleepingPeer(Peer):
    """An engine that fetches weights with checkpoint-engine's receiver.

    record: what it was asked, among the trainer's own work. weights: that it has, None while it
    sleeps. As an engine does, it fails if it is asked in another order.
    """

    def __init__(self, record: list[str]) -> None:
        super().__init__()
        self.record = record
        self.weights: dict[str, torch.Tensor] | None = {}
        self.awake_tags = {"weights", "kv_cache", "cuda_graph"}
        self._worker = receiver()  # its import takes seconds

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path == "/release_memory_occupation":
            self._note("sleep", request["tags"])
            self.awake_tags -= set(request["tags"])
            self.weights = None
        elif path == "/resume_memory_occupation":
            self._note("wake", request["tags"])
            self.awake_tags |= set(request["tags"])
        elif path == "/update_weights_from_ipc":
            self._fetch(request["zmq_handles"])
        elif path in _SHORT_NAMES:
            self.record.append(_SHORT_NAMES[path])
        return super().answer(path, request)

    def _note(self, what: str, tags: list[str]) -> None:
        self.record.append(f"{what} {'+'.join(tags)}")

    def _fetch(self, addresses: dict[str, str]) -> None:
        assert self.awake_tags == {"weights"}, self.awake_tags
        ((device, address),) = addresses.items()
        self.record.append(f"fetch on {device}")
        self.last_update = self._empty()
        self.weights = weights = {}

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in tensors:
                assert tensor.device.type == "cuda"
                weights[name] = tensor.clone()
                self.last_update.add(name, tensor)

        context = zmq.Context()
        self._worker.update_weights_from_ipc(context, address, 0, run=load)
        context.destroy(linger=0)


def run_colocated_steps(
    c: Configuration, worker: Worker, plan: StepPlan, out: Path
) -> dict[str, Any]:
    """Let the engine sleep, send, and train a step between two syncs."""
    settings = replace(
        c,
        engine=replace(c.engine, colocated=True),
        sync=replace(c.sync, transport="ipc", timeout_s=60.0),
    )
    record: list[str] = []
    peer = SleepingPeer(record)
    members = _serve(peer)
    sync = _open_sync(settings, worker, members, out, record)
    sync.sleep()  # before the model takes the device
    metrics = [sync.send(sync.next_command(), worker.export())]
    equal = [_are_equal(worker, peer)]
    sync.sleep()
    record.append("train")
    worker.train(plan)
    metrics.append(sync.send(sync.next_command(), worker.export()))
    equal.append(_are_equal(worker, peer))
    sync.close()
    return {
        "record": record,
        "equal": equal,
        "compared": [values["sync/audit_compared"] for values in metrics],
        "mismatches": [values["sync/audit_mismatches"] for values in metrics],
        "handles": current().handles.num_handles,
        "opened": current().handles.num_opened,
        "fraction": _memory_fraction(settings, worker.shape, worker.layout),
    }


def _serve(peer: SleepingPeer) -> Members:
    """Serve the engine until this process ends, and return it as the only one of a run."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(peer))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    members = Members()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    members.add("engine", Engine(url=url, gpus=(0,)))
    members.answer("engine", 0)
    return members


def _open_sync(
    c: Configuration, worker: Worker, members: Members, out: Path, record: list[str]
) -> WeightSync:
    cuda: Any = torch.cuda
    empty_cache = cuda.empty_cache

    def note_empty_cache() -> None:
        empty_cache()
        if threading.current_thread() is threading.main_thread():
            record.append("free")

    cuda.empty_cache = note_empty_cache
    return open_weight_sync(
        members,
        create_keys(),
        c.sync,
        c.engine,
        worker.shape,
        directory=out / "sync",
        model_path=out,
        job=worker.layout,
        log=print,
    )


def _are_equal(worker: Worker, peer: SleepingPeer) -> bool:
    """Compare the engine's weights with the trainer's, bit for bit."""
    weights = dict(worker.export().stream_all())
    assert peer.weights is not None
    return peer.weights.keys() == weights.keys() and all(
        torch.equal(peer.weights[name], tensor) for name, tensor in weights.items()
    )
