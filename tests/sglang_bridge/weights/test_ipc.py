"""Weights that ranks hand over to engines on their devices, by checkpoint-engine's protocol."""

from __future__ import annotations

import pickle
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed, WeightUpdateFailed
from sglang_bridge.weights.ipc.transport import IpcTransport
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.source import SoleSource
from sglang_bridge.weights.updater import WeightUpdater
from tests.support import thread_ranks
from tests.support.ipc_receiver import (
    ReceivingAdmin,
    receiver_without_device,
    share,
    weights_of,
)

SECONDS = 8.0
BUCKET = 300  # bytes


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    return receiver_without_device(monkeypatch)


class MailCrew:
    """The ranks of a job, which are threads."""

    def __init__(self, group: thread_ranks.Group) -> None:
        self.rank = group[1]
        self._group = group

    def tell(self, data: bytes | None) -> bytes:
        return thread_ranks.broadcast_bytes(data, self._group)

    def gather(self, data: bytes) -> list[bytes]:
        return thread_ranks.gather_bytes(data, self._group)


class Admin(ReceivingAdmin):
    """Answers the other requests of an update.

    calls: their names. errors: of fetching weights. folders: of the addresses of the weights, with
    their modes meanwhile.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []
        self.errors = queue.SimpleQueue[str]()
        self.folders: dict[Path, int] = {}
        self._label = ""

    def update_weights_from_ipc(self, addresses: Mapping[str, str], *, timeout: float) -> None:
        for address in addresses.values():
            folder = Path(address.removeprefix("ipc://")).parent
            self.folders[folder] = stat.S_IMODE(folder.stat().st_mode)
        try:
            super().update_weights_from_ipc(addresses, timeout=timeout)
        except RequestFailed as error:
            self.errors.put(str(error))
            raise

    def set_weight_version(self, version: str) -> None:
        self._label = version

    def weight_version(self) -> str:
        return self._label

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def end_weight_update(self) -> None:
        raise RequestFailed("no session is open")


Streams = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def run_update(
    admins: list[Admin],
    ranks: int,
    stream: Streams,
    *,
    seconds: float = SECONDS,
    times: int = 1,
    share: Any = share,
) -> list[Any]:
    """Send weights from ranks on the devices of one node. Returns each rank's error or summary."""
    by_url = {admin.url: admin for admin in admins}

    def work(group: thread_ranks.Group) -> Any:
        crew = MailCrew(group)
        transport = IpcTransport(
            crew=crew,
            node=0,
            gpu=crew.rank,
            device=torch.device("cpu"),
            timeout_seconds=seconds,
            log=lambda _: None,
            name_device=lambda _: f"GPU-{crew.rank}",
            share=share,
        )

        def open_admin(engine: Engine) -> AdminClient:
            return by_url[engine.url]

        part = RankPart(
            transport, crew, bucket_bytes=BUCKET, open_admin=open_admin, is_everywhere=True
        )
        source = SoleSource(stream, unit_bytes=BUCKET + 100)
        try:
            if crew.rank:
                for _ in range(times):
                    part.follow(source)
                return None
            updater = WeightUpdater(part)
            for version in range(times):
                updater.push(source, version, list(admins))
            return updater.summary
        finally:
            transport.close()

    results = thread_ranks.run_on_ranks(ranks, work)
    folders = {folder: mode for admin in admins for folder, mode in admin.folders.items()}
    assert set(folders.values()) <= {0o700}, "engines unpickle what arrives there"
    assert not any(folder.exists() for folder in folders)
    return results


def engine_of(*gpus: int) -> Engine:
    return Engine(url=f"http://127.0.0.1:{gpus[0] + 1}", tp=len(gpus), gpus=gpus)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[(0,)], [(0,), (1,)], [(0, 1)], [(0, 1), (2, 3)]], ids=str)
def test_every_rank_of_every_engine_gets_all_tensors(
    worker: Any, dtype: torch.dtype, sizes: list[tuple[int, ...]]
) -> None:
    admins = [Admin(worker, engine_of(*gpus)) for gpus in sizes]
    num_ranks = sum(map(len, sizes))
    summary, *others = run_update(admins, num_ranks, lambda: weights_of(9, dtype), times=2)
    assert others == [None] * (num_ranks - 1)
    originals = dict(weights_of(9, dtype))
    for admin, gpus in zip(admins, sizes, strict=True):
        assert admin.weights.keys() == {f"GPU-{gpu}" for gpu in gpus}
        for weights in admin.weights.values():
            require_equal(weights, originals)
        assert admin.calls == ["pause", "flush", "resume"] * 2
        assert admin.weight_version() == "1"
        assert admin.requests[0] != admin.requests[1], "a socket serves one update"
    assert set(summary.bytes_sent.values()) == {num_bytes_of(originals)}


def num_bytes_of(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def require_equal(weights: dict[str, torch.Tensor], originals: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == originals.keys()
    for name, tensor in originals.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor)


def test_an_engine_that_cannot_load_a_bucket_ends_its_update_and_others_go_on(worker: Any) -> None:
    def refuse(tensors: list[tuple[str, torch.Tensor]]) -> None:
        if tensors[0][0] != "layers.0.weight":
            raise ValueError("no room")

    admins = [Admin(worker, engine_of(0), refuse), Admin(worker, engine_of(1))]
    error, _ = run_update(admins, 2, lambda: weights_of(9, torch.float32))
    assert isinstance(error, WeightUpdateFailed)
    assert error.failures.keys() == {admins[0].url}
    assert "could not load" in str(error) and "no room" in str(error)
    assert "resume" not in admins[0].calls and "resume" in admins[1].calls


def open_in_vain(*_: object) -> torch.Tensor:
    raise RuntimeError("invalid device context")


def test_an_engine_that_cannot_map_the_memory_is_told_and_named(worker: Any) -> None:
    (error,) = run_update(
        [Admin(worker, engine_of(0))],
        1,
        lambda: weights_of(2, torch.float32),
        share=lambda tensor: (open_in_vain, share(tensor)[1]),
    )
    assert "could not map the memory" in str(error) and "invalid device context" in str(error)


def test_an_engine_without_the_package_is_named_at_once() -> None:
    class Old(Admin):
        def update_weights_from_ipc(self, addresses: Any, *, timeout: float) -> None:
            raise RequestFailed("ImportError checkpoint-engine is not installed")

    start = time.monotonic()
    (error,) = run_update([Old(None, engine_of(0))], 1, lambda: weights_of(2, torch.float32))
    assert "checkpoint-engine is not installed" in str(error)
    assert time.monotonic() - start < SECONDS / 2


def test_an_engine_that_does_not_answer_costs_no_more_than_the_limit() -> None:
    class Silent(Admin):
        def update_weights_from_ipc(self, addresses: Any, *, timeout: float) -> None:
            threading.Event().wait(timeout)

    start = time.monotonic()
    (error,) = run_update(
        [Silent(None, engine_of(0))], 1, lambda: weights_of(2, torch.float32), seconds=1.0
    )
    assert "no answer before sync.timeout_s" in str(error)
    assert time.monotonic() - start < 15


def test_an_export_that_fails_ends_the_engines_update(worker: Any) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights_of(9, torch.float32)
        raise FloatingPointError("NaN in the export")

    admin = Admin(worker, engine_of(0))
    (error,) = run_update([admin], 1, stream)
    assert isinstance(error, FloatingPointError)
    assert "resume" not in admin.calls
    assert "NaN in the export" in admin.errors.get(timeout=SECONDS)


def test_an_export_that_fails_before_an_engine_connects_does_not_wait_for_it() -> None:
    class Late(Admin):
        def update_weights_from_ipc(self, addresses: Any, *, timeout: float) -> None:
            threading.Event().wait(timeout)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        raise FloatingPointError("NaN in the export")
        yield

    results: list[Any] = []
    admins: list[Admin] = [Late(None, engine_of(0))]
    thread = threading.Thread(
        target=lambda: results.extend(run_update(admins, 1, stream)), daemon=True
    )
    thread.start()
    thread.join(SECONDS)
    assert [type(result) for result in results] == [FloatingPointError]


def test_an_engine_on_devices_without_a_rank_is_refused_by_name() -> None:
    admin = Admin(None, engine_of(0, 1))
    (error,) = run_update([admin], 1, lambda: weights_of(2, torch.float32))
    assert "1 rank(s) of the trainer are on the 2 device(s)" in str(error)


def test_what_an_engine_answers_is_never_unpickled(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensors: object) -> None:
        raise ValueError("x")

    # The engine's side unpickles with zmq's function of the module
    original = pickle.loads
    names: list[str] = []

    def note(data: bytes, *args: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return original(data, *args, **options)

    monkeypatch.setattr(pickle, "loads", note)
    main = threading.current_thread().name
    run_update([Admin(worker, engine_of(0), refuse)], 1, lambda: weights_of(2, torch.float32))
    assert names and main not in names
    assert not any(name.startswith("ThreadPoolExecutor") for name in names)  # the ranks
