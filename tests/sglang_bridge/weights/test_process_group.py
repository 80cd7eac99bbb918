"""A process group with another process that joins it as SGLang does.

This side has no default group.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_bridge.errors import RequestFailed
from sglang_bridge.weights import process_group, weight_group
from sglang_bridge.weights.calls import start_call
from sglang_bridge.weights.crew import SendReport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.process_group import leave
from tests.sglang_bridge.weights.group_peer import PeerAdmin, serve_peer
from tests.support.forks import FORKS

URL = "http://127.0.0.1:1"
Peer = tuple[PeerAdmin, BaseProcess]


@contextlib.contextmanager
def open_peer(url: str) -> Iterator[Peer]:
    """A process with one end of a pipe, and the admin that sends to it."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=serve_peer, args=(theirs,), daemon=True)
    process.start()
    assert ours.recv() == "imported"
    yield PeerAdmin(url, ours), process
    process.kill()
    process.join()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with open_peer(URL) as process:
        yield process


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    """Three engines."""
    with contextlib.ExitStack() as stack:
        urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
        yield [stack.enter_context(open_peer(url)) for url in urls]


def send(
    sender: DistributedTransport,
    admin: PeerAdmin,
    *tensors: torch.Tensor,
    bucket_bytes: int = 8,
    seconds: float = 20.0,
) -> SendReport:
    """Send tensors to one engine, each as a bucket of its own."""
    stream = iter([(f"w{index}", tensor) for index, tensor in enumerate(tensors)])
    deadline = time.monotonic() + seconds
    return sender.send(stream, [admin], 7, bucket_bytes=bucket_bytes, deadline=deadline)


def transport(timeout: float = 20.0) -> DistributedTransport:
    return DistributedTransport(backend="gloo", timeout_seconds=timeout)


def tree_transport(size: int) -> DistributedTransport:
    return DistributedTransport(backend="gloo", timeout_seconds=20.0, engines_per_tree=size)


@pytest.mark.slow
def test_buckets_arrive_and_no_default_group_appears(peer: Peer) -> None:
    had_default_group = dist.is_initialized()
    sender = transport()
    assert sender.connect([peer[0]]) == {}
    report = send(sender, peer[0], torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
    assert (report.failures, report.num_tensors, report.bytes_sent) == ({}, 2, {URL: 12})
    assert peer[0].buckets == [[1.0, 2.0], [3.0]]
    assert dist.is_initialized() == had_default_group
    sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs", "refuses"])
def test_failed_peer_is_reported_within_the_timeout(peer: Peer, how: str) -> None:
    admin, process = peer
    sender = transport()
    assert sender.connect([admin]) == {}
    assert process.pid is not None
    if how == "dies":
        process.kill()
        process.join()
    elif how == "hangs":
        os.kill(process.pid, signal.SIGSTOP)
    else:
        admin.refuse = True
    start = time.monotonic()
    report = send(sender, admin, torch.zeros(2**23), bucket_bytes=2**25, seconds=3.0)
    assert set(report.failures) == {URL}
    assert time.monotonic() - start < 15.0
    sender.forget(admin)
    sender.close()


@pytest.mark.slow
def test_failed_engine_is_dropped_without_waiting_for_its_broadcast(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the thread that leaves the group finishes first."""
    left = threading.Event()

    def leave_first(group: dist.ProcessGroup) -> None:
        leave(group)
        left.set()

    def start_and_wait(function: Callable[[], None]) -> None:
        start_call(function)
        assert left.wait(10)
        time.sleep(0.2)

    admin, _ = peer
    sender = transport()
    assert sender.connect([admin]) == {}
    admin.refuse = True
    report = send(sender, admin, torch.zeros(2**23), bucket_bytes=2**25)
    assert report.failures == {URL: "no session is open (it should take w0, 32.0 MB)"}
    monkeypatch.setattr(weight_group, "abort", leave_first)
    monkeypatch.setattr(weight_group, "start_call", start_and_wait)
    start = time.monotonic()
    sender.forget(admin)
    assert time.monotonic() - start < 12.0  # the broadcast waits for twenty


def send_to_tree(
    sender: DistributedTransport, admins: list[PeerAdmin], *numbers: float, seconds: float = 20.0
) -> SendReport:
    """Send each number as a bucket of its own."""
    stream = iter([(f"w{index}", torch.tensor([value])) for index, value in enumerate(numbers)])
    deadline = time.monotonic() + seconds
    return sender.send(stream, admins, 7, bucket_bytes=4, deadline=deadline)


@pytest.mark.slow
def test_a_tree_gets_each_bucket_in_one_broadcast(peers: list[Peer]) -> None:
    admins = [admin for admin, _ in peers]
    sender = tree_transport(size=2)
    assert sender.connect(admins) == {}
    report = send_to_tree(sender, admins, 1.0, 2.0, 3.0)
    assert (report.failures, report.num_tensors) == ({}, 3)
    # The third engine has a tree of its own
    assert report.bytes_sent == {admins[0].url: 12, admins[2].url: 12}
    for admin in admins:
        assert admin.buckets == [[1.0], [2.0], [3.0]]
    ranks = [(admin.join["rank_offset"], admin.join["world_size"]) for admin in admins]
    assert ranks == [(1, 3), (2, 3), (1, 2)]
    names = [admin.join["name"] for admin in admins]
    assert names[0] == names[1] != names[2]
    sender.close()


@pytest.mark.slow
def test_an_engine_that_dies_takes_its_tree_with_it_and_no_other(peers: list[Peer]) -> None:
    admins = [admin for admin, _ in peers]
    sender = tree_transport(size=2)
    assert sender.connect(admins) == {}
    peers[1][1].kill()
    peers[1][1].join()
    start = time.monotonic()
    report = send_to_tree(sender, admins, 1.0, 2.0, seconds=6.0)
    assert time.monotonic() - start < 24.0
    assert set(report.failures) == {admins[0].url, admins[1].url}
    for reason in report.failures.values():
        assert "share a tree (sync.engines_per_tree)" in reason
    assert admins[2].buckets == [[1.0], [2.0]]
    for admin in admins[:2]:
        sender.forget(admin)
    sender.close()


@pytest.mark.slow
def test_a_tree_that_lacks_an_engine_is_not_used(peers: list[Peer]) -> None:
    """An engine that failed since the tree was formed would keep the broadcast waiting."""
    admins = [admin for admin, _ in peers]
    sender = tree_transport(size=2)
    assert sender.connect(admins) == {}
    report = send_to_tree(sender, [admins[2], admins[0]], 1.0)
    assert set(report.failures) == {admins[0].url}
    assert admins[1].url in report.failures[admins[0].url]
    assert (admins[0].buckets, admins[2].buckets) == ([], [[1.0]])
    sender.close()


@pytest.mark.slow
def test_an_engine_that_does_not_answer_is_left_out_of_a_new_tree(peers: list[Peer]) -> None:
    admins = [admin for admin, _ in peers]
    admins[1].is_up = False
    sender = tree_transport(size=3)
    assert set(sender.connect(admins)) == {admins[1].url}
    report = send_to_tree(sender, [admins[0], admins[2]], 4.0)
    assert report.failures == {}
    assert (admins[0].buckets, admins[2].buckets) == ([[4.0]], [[4.0]])
    sender.close()


def test_a_tree_of_engines_here_and_elsewhere_meets_at_an_address_of_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = {"127.0.0.1": "127.0.0.1", "10.0.0.7": "10.0.0.1"}
    monkeypatch.setattr(weight_group, "address_towards", lambda host, port: routes[host])
    # No interface of this machine has the address of the network
    store = SimpleNamespace(port=1, num_keys=lambda: 0, list_keys=list)
    monkeypatch.setattr(weight_group, "open_store", lambda *_, **__: store)

    class Absent(PeerAdmin):
        def init_weights_update_group(self, **request: Any) -> None:
            self.join = request
            raise RequestFailed("enough")

    admins = [Absent("http://127.0.0.1:6", None), Absent("http://10.0.0.7:5", None)]
    tree_transport(size=2).connect(admins)
    assert [admin.join["address"] for admin in admins] == ["10.0.0.1"] * 2
    tree_transport(size=2).connect(admins[:1])
    assert admins[0].join["address"] == "127.0.0.1"


@pytest.mark.slow
def test_an_engine_that_ends_while_its_group_forms_is_reported_within_half_of_the_timeout(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some engines would connect to this process, and others wait for it: gloo decides."""
    join = weight_group.join_as_source
    for admin, process in peers:

        def kill_and_join(
            *arguments: Any, victim: BaseProcess = process, **options: Any
        ) -> dist.ProcessGroup:
            victim.kill()
            victim.join()
            return join(*arguments, **options)

        monkeypatch.setattr(weight_group, "join_as_source", kill_and_join)
        start = time.monotonic()
        assert set(transport(timeout=20.0).connect([admin])) == {admin.url}
        assert time.monotonic() - start < 16.0


@pytest.mark.slow
def test_a_bucket_may_take_longer_than_it_takes_to_join(peer: Peer) -> None:
    """Gloo gets less time for a connection than for a transfer."""
    admin, process = peer
    sender = transport(timeout=10.0)
    assert sender.connect([admin]) == {}
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    wake = threading.Timer(3.0, os.kill, (process.pid, signal.SIGCONT))
    wake.start()
    report = send(sender, admin, torch.zeros(2**23), bucket_bytes=2**25)
    assert report.failures == {}
    sender.close()


def test_engine_that_never_joins_is_reported() -> None:
    class Absent(PeerAdmin):
        def init_weights_update_group(self, **request: object) -> None:
            time.sleep(60)

    failures = transport(timeout=1.0).connect([Absent(URL, None)])
    assert "no engine joined" in failures[URL]


@pytest.mark.slow
def test_a_tree_of_which_one_engine_never_joins_is_reported(peer: Peer) -> None:
    class Absent(PeerAdmin):
        def init_weights_update_group(self, **request: object) -> None:
            time.sleep(60)

    admins = [peer[0], Absent("http://127.0.0.1:2", None)]
    sender = DistributedTransport(backend="gloo", timeout_seconds=4.0, engines_per_tree=2)
    failures = sender.connect(admins)
    assert set(failures) == {admin.url for admin in admins}
    assert "only 1 of 2 engine ranks joined" in failures[URL]


def test_an_engine_that_refuses_to_join_is_reported_at_once() -> None:
    class Refusing(PeerAdmin):
        def init_weights_update_group(self, **request: object) -> None:
            raise RequestFailed("not today")

    start = time.monotonic()
    assert transport(timeout=30.0).connect([Refusing(URL, None)]) == {URL: "not today"}
    assert time.monotonic() - start < 20.0


def test_an_open_session_of_another_trainer_is_named() -> None:
    class Busy(PeerAdmin):
        def begin_weight_update(self) -> None:
            raise RequestFailed("a weight-update session is already open")

    class Broken(PeerAdmin):
        def begin_weight_update(self) -> None:
            raise RequestFailed("out of memory")

    other = "http://127.0.0.1:2"
    admins = [Busy(URL, None), Broken(other, None)]
    failures = transport().begin(admins, 1, time.monotonic() + 5)
    assert "another trainer updates this engine" in failures[URL]
    assert failures[other] == "out of memory"


def test_each_engine_gets_an_address_that_it_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local engine and one on another machine need different addresses of this process."""
    # This process's address on the route to each host.
    routes = {"127.0.0.1": "127.0.0.1", "10.0.0.7": "127.0.0.2"}
    monkeypatch.setattr(weight_group, "address_towards", lambda host, port: routes[host])
    addresses = {}

    class Absent(PeerAdmin):
        def init_weights_update_group(self, **request: object) -> None:
            addresses[self.url] = request["address"]
            raise RequestFailed("enough")

    urls = ("http://10.0.0.7:5", "http://127.0.0.1:6")
    assert set(transport().connect([Absent(url, None) for url in urls])) == set(urls)
    assert addresses == {urls[0]: "127.0.0.2", urls[1]: "127.0.0.1"}


@pytest.mark.parametrize(
    "options",
    [{"backend": "mpi"}, {"backend": "nccl"}, {"backend": "gloo", "device": torch.device("cuda")}],
)
def test_unusable_backends_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="backend"):
        DistributedTransport(timeout_seconds=1.0, **options)


@pytest.mark.parametrize(("backend", "calls"), [("nccl", ["abort"]), ("gloo", ["leave"])])
def test_abandoned_groups_of_nccl_are_aborted(
    monkeypatch: pytest.MonkeyPatch, backend: str, calls: list[str]
) -> None:
    """NCCL's watchdog would end the trainer at the timeout of a pending broadcast."""
    results: list[str] = []
    monkeypatch.setattr(process_group.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(process_group, "abort_transfers", lambda group: results.append("abort"))
    monkeypatch.setattr(process_group, "leave", lambda group: results.append("leave"))
    group: Any = object()
    process_group.abort(group)
    assert results == calls


@pytest.mark.parametrize(
    ("backend", "level", "seconds"),
    [("gloo", "OFF", [6.0, 60.0]), ("gloo", "DETAIL", [60.0]), ("nccl", "OFF", [60.0])],
)
def test_a_join_is_short_if_the_timeout_can_change_later(
    monkeypatch: pytest.MonkeyPatch, backend: str, level: str, seconds: list[float]
) -> None:
    """Torch wraps groups in detailed debugging, and their timeout stays as it was."""
    timeouts: list[float] = []

    def make_group(*_: Any, timeout_seconds: float, **__: Any) -> object:
        timeouts.append(timeout_seconds)
        return object()

    monkeypatch.setattr(process_group, "make_group", make_group)
    monkeypatch.setattr(process_group, "set_timeout", lambda _, seconds: timeouts.append(seconds))
    debug_level = getattr(dist.DebugLevel, level)
    monkeypatch.setattr(process_group.dist, "get_debug_level", lambda: debug_level)
    process_group.join_as_source(
        dist.HashStore(), name="weights", world_size=2, backend=backend, timeout_seconds=60.0
    )
    assert timeouts == seconds
