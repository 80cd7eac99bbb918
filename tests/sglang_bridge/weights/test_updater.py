"""Order and failures of a weight update, with engines and a transport that record calls."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError, RequestFailed, WeightUpdateFailed
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.calls import Failures
from sglang_bridge.weights.crew import Alone, SendReport
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.source import SoleSource
from sglang_bridge.weights.updater import WeightUpdater

A = "http://127.0.0.1:1"
B = "http://127.0.0.1:2"


class RecordingAdmin(AdminClient):
    """Records control calls. failing_calls: the names of calls that fail."""

    def __init__(self, url: str, log: list[str], failing_calls: set[str]) -> None:
        super().__init__(Engine(url=url), create_keys())
        self.label = "default"
        self._log = log
        self._failing_calls = failing_calls

    def set_weight_version(self, version: str) -> None:
        self._call("claim" if version.startswith("updating-") else f"version {version}")
        self.label = version

    def weight_version(self) -> str:
        return self.label

    def _call(self, name: str) -> None:
        self._log.append(f"{name} {self.url[-1]}")
        if name in self._failing_calls:
            raise RequestFailed(f"{name} refused")

    def pause(self) -> None:
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self, tags: Sequence[str]) -> None:
        self._call(f"wake {'+'.join(tags)}")

    def flush_cache(self) -> None:
        self._call("flush")

    def end_weight_update(self) -> None:
        self._call("end-old")


class RecordingTransport:
    """Records its calls. `script` may add failures."""

    timeout_seconds = 20.0

    def __init__(self, log: list[str], script: Callable[[str], Failures]) -> None:
        self._log = log
        self._script = script

    def _record(self, what: str, admins: Sequence[AdminClient]) -> Failures:
        self._log.append(f"{what} {''.join(admin.url[-1] for admin in admins)}")
        return self._script(what)

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        return self._record("connect", admins)

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        return self._record("begin", admins)

    def send(
        self,
        tensors: NamedTensors,
        admins: Sequence[AdminClient],
        version: int,
        *,
        bucket_bytes: int,
        deadline: float,
    ) -> SendReport:
        failures: Failures = {}
        names = []
        for name, _ in tensors:
            names.append(name)
            failures |= self._record(f"send {name}", admins)
        return SendReport(
            num_tensors=len(names),
            failures=failures,
            bytes_sent={admin.url: 4 * len(names) for admin in admins},
            seconds={"send": 2.0, "load": 1.0},
        )

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> Failures:
        return self._record("end", admins)

    def forget(self, admin: AdminClient) -> None:
        self._log.append(f"forget {admin.url[-1]}")

    def close(self) -> None:
        self._log.append("close")


def open_part(transport: RecordingTransport, bucket_bytes: int = 4) -> RankPart:
    def open_admin(engine: Engine) -> AdminClient:
        raise AssertionError("rank 0 has a client already")

    return RankPart(transport, Alone(), bucket_bytes=bucket_bytes, open_admin=open_admin)


class Setup:
    """Two engines, A and B, and their log."""

    def __init__(
        self,
        script: Callable[[str], Failures] = lambda _: {},
        failing_calls: dict[str, set[str]] | None = None,
    ) -> None:
        self.log: list[str] = []
        self.failing_calls = failing_calls or {}
        self.admins = [
            RecordingAdmin(url, self.log, self.failing_calls.get(url, set())) for url in (A, B)
        ]
        self.updater = WeightUpdater(open_part(RecordingTransport(self.log, script)))

    def push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Send weights to both engines."""
        self.updater.push(SoleSource(lambda: weights), version, self.admins)

    def take_log(self) -> list[str]:
        log = list(self.log)
        self.log.clear()
        return log


def weights(count: int = 2, reads: list[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(count):
        if reads is not None:
            reads.append(str(index))
        yield str(index), torch.ones(1)


def test_order_of_calls_in_an_update() -> None:
    setup = Setup()
    setup.push(weights(), 1)
    log = setup.take_log()
    assert set(log[:2]) == {"pause 1", "pause 2"}
    assert set(log[2:4]) == {"end-old 1", "end-old 2"}
    log = log[2:]
    assert log[2:4] == ["connect 12", "begin 12"]
    assert set(log[4:6]) == {"claim 1", "claim 2"}
    assert log[6:9] == ["send 0 12", "send 1 12", "end 12"]
    assert set(log[9:11]) == {"version 1 1", "version 1 2"}
    assert (set(log[11:13]), set(log[13:])) == ({"flush 1", "flush 2"}, {"resume 1", "resume 2"})


def test_an_engine_that_sleeps_wakes_its_weights_before_a_sync_and_its_caches_after() -> None:
    setup = Setup()
    setup.push(weights(), 0)
    setup.updater.sleep(setup.admins)
    setup.updater.sleep(setup.admins)  # does not reach an engine that sleeps
    setup.take_log()
    setup.push(weights(), 1)
    log = [entry.rpartition(" ")[0] for entry in setup.take_log() if entry.endswith("2")]
    assert log == [
        "pause",
        "connect",
        "wake weights",
        "begin",
        "claim",
        "send 0",
        "send 1",
        "end",
        "version 1",
        "flush",
        "wake kv_cache+cuda_graph",
        "resume",
    ]
    setup.push(weights(), 2)
    assert not any("wake" in entry for entry in setup.log)


def test_all_engines_are_asked_to_sleep_before_a_refusal_is_raised() -> None:
    setup = Setup(failing_calls={A: {"sleep"}})
    with pytest.raises(EngineError, match=r"1 engine.*127\.0\.0\.1:1: sleep refused"):
        setup.updater.sleep(setup.admins)
    assert set(setup.take_log()) == {"sleep 1", "sleep 2"}


def test_an_engine_that_does_not_wake_gets_no_weights() -> None:
    setup = Setup(failing_calls={A: {"wake weights"}})
    setup.updater.sleep(setup.admins)
    with pytest.raises(WeightUpdateFailed, match="wake weights refused"):
        setup.push(weights(), 1)
    assert "send 0 2" in setup.log and "resume 1" not in setup.log


def test_every_rank_frees_memory_before_engines_wake() -> None:
    log: list[str] = []
    transport = RecordingTransport(log, lambda _: {})
    part = RankPart(
        transport,
        Alone(),
        bucket_bytes=4,
        open_admin=lambda engine: RecordingAdmin(engine.url, log, set()),
        free_memory=lambda: log.append("free"),
    )
    updater = WeightUpdater(part)
    admin = RecordingAdmin(A, log, set())
    updater.sleep([admin])
    updater.push(SoleSource(weights), 1, [admin])
    places = [log.index("wake weights 1"), log.index("wake kv_cache+cuda_graph 1")]
    frees = [index for index, entry in enumerate(log) if entry == "free"]
    assert frees[0] < places[0] < log.index("send 1 1") < frees[1] < places[1]


def test_failed_engine_stays_paused_and_others_are_updated() -> None:
    setup = Setup(lambda what: {A: "it died"} if what.startswith("send 0") else {})
    reads: list[str] = []
    with pytest.raises(
        WeightUpdateFailed, match=r"1 engine\(s\): http://127.0.0.1:1: it died"
    ) as error_info:
        setup.push(weights(3, reads), 5)
    assert reads == ["0", "1", "2"]
    assert error_info.value.failures == {A: "it died"}
    assert error_info.value.updated_urls == (B,)
    log = setup.take_log()
    start = log.index("end 2")
    assert log[start:] == ["end 2", "version 5 2", "flush 2", "resume 2", "forget 1"]


def test_the_stream_is_exhausted_even_when_every_engine_fails() -> None:
    setup = Setup(lambda what: {A: "x", B: "x"} if what == "begin" else {})
    reads: list[str] = []
    with pytest.raises(WeightUpdateFailed):
        setup.push(weights(4, reads), 1)
    assert len(reads) == 4
    assert not any(entry.startswith(("send", "resume")) for entry in setup.log)


def test_the_stream_is_exhausted_even_when_the_transport_breaks() -> None:
    def script(what: str) -> Failures:
        if what.startswith("send"):
            raise RuntimeError("no such interface")
        return {}

    reads: list[str] = []
    setup = Setup(script)
    with pytest.raises(RuntimeError, match="no such interface"):
        setup.push(weights(4, reads), 1)
    assert len(reads) == 4


def test_export_error_is_raised_and_engines_stay_paused() -> None:
    def failing_export() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(2)
        raise FloatingPointError("NaN in the export")

    setup = Setup()
    with pytest.raises(FloatingPointError):
        setup.push(failing_export(), 1)
    assert not any(entry.startswith("resume") for entry in setup.log)


def test_a_run_closes_the_session_that_a_dead_trainer_left_open() -> None:
    """An engine refuses a new session while one is open, and an end without one.

    The updater ignores the latter.
    """
    sessions = {A: True, B: False}

    class Admin(RecordingAdmin):
        def end_weight_update(self) -> None:
            super().end_weight_update()
            if not sessions[self.url]:
                raise RequestFailed("no weight-update session is open")
            sessions[self.url] = False

    def begin(what: str) -> Failures:
        return {
            url: "a session is already open"
            for url in sessions
            if what == "begin" and sessions[url]
        }

    log: list[str] = []
    admins = [Admin(url, log, set()) for url in (A, B)]
    updater = WeightUpdater(open_part(RecordingTransport(log, begin)))
    updater.push(SoleSource(weights), 0, admins)
    assert log.index("begin 12") > log.index("end-old 1")
    assert {"resume 1", "resume 2"} <= set(log)


def test_old_sessions_are_closed_only_before_the_first_update() -> None:
    setup = Setup()
    setup.push(weights(), 0)
    setup.take_log()
    setup.push(weights(), 1)
    assert not any(entry.startswith("end-old") for entry in setup.log)


def test_after_a_failure_the_old_session_is_closed_first() -> None:
    failing = [True]
    setup = Setup(lambda what: {A: "x"} if what.startswith("send 0") and failing else {})
    with pytest.raises(WeightUpdateFailed):
        setup.push(weights(), 1)
    failing.clear()
    setup.take_log()
    setup.push(weights(), 2)
    log = setup.take_log()
    assert "end-old 1" in log and "end-old 2" not in log
    assert log.index("end-old 1") < log.index("begin 12")


def test_weights_go_to_the_engines_of_the_call_alone() -> None:
    """An engine that joins gets the weights between two updates of all."""
    setup = Setup()
    setup.push(weights(), 0)
    setup.take_log()
    setup.updater.push(SoleSource(weights), 0, setup.admins[1:])
    log = setup.take_log()
    assert log == [
        "pause 2",
        "connect 2",
        "begin 2",
        "claim 2",
        "send 0 2",
        "send 1 2",
        "end 2",
        "version 0 2",
        "flush 2",
        "resume 2",
    ]
    setup.push(weights(), 1)
    assert not any(entry.startswith("end-old") for entry in setup.log)


def test_the_stream_is_exhausted_without_an_engine() -> None:
    """The other ranks export too, while every engine is out."""
    setup = Setup()
    reads: list[str] = []
    setup.updater.push(SoleSource(lambda: weights(3, reads)), 1, [])
    assert reads == ["0", "1", "2"]
    assert not any(entry.startswith("send") for entry in setup.log)


def test_an_engine_that_is_forgotten_gets_a_new_session() -> None:
    """The engine was started again, or its next client knows nothing of the old session."""
    setup = Setup()
    setup.push(weights(), 0)
    setup.take_log()
    setup.updater.forget(setup.admins[0])
    assert setup.take_log() == ["forget 1"]
    setup.push(weights(), 1)
    log = setup.take_log()
    assert "end-old 1" in log and "end-old 2" not in log


def test_failed_control_calls_fail_the_update() -> None:
    setup = Setup(failing_calls={B: {"flush"}})
    with pytest.raises(WeightUpdateFailed) as error_info:
        setup.push(weights(), 1)
    assert error_info.value.failures == {B: "flush refused"}
    assert "resume 2" not in setup.log


def test_bucket_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"sync\.bucket_mb"):
        open_part(RecordingTransport([], lambda _: {}), bucket_bytes=0)


def test_an_engine_that_another_trainer_updates_serves_neither() -> None:
    """The other trainer has closed the session of this one, and begun its own."""
    setup = Setup()

    def stolen() -> NamedTensors:
        yield from weights()
        setup.admins[0].label = "updating-by-another"

    with pytest.raises(WeightUpdateFailed, match="another trainer updates this engine"):
        setup.push(stolen(), 3)
    log = setup.take_log()
    assert "version 3 2" in log and "resume 2" in log
    assert "version 3 1" not in log and "resume 1" not in log


def test_what_an_update_took_is_summed_up() -> None:
    setup = Setup()
    setup.push(weights(), 1)
    summary = setup.updater.summary
    assert summary.bytes_sent == {(0, A): 8, (0, B): 8}
    assert set(summary.seconds) == {"gather", "send", "load", "flush"}
    assert summary.seconds["send"] == 2.0 and summary.seconds["load"] >= 1.0


def test_nothing_to_send_is_an_error() -> None:
    with pytest.raises(ValueError, match="there are no weights to send"):
        Setup().push(weights(0), 1)


def test_a_tensor_of_another_dtype_is_refused() -> None:
    """An engine would convert it without a word."""
    setup = Setup()
    part = RankPart(
        RecordingTransport(setup.log, lambda _: {}),
        Alone(),
        bucket_bytes=4,
        open_admin=lambda engine: setup.admins[0],
        dtype_of=lambda name: torch.bfloat16,
    )
    with pytest.raises(ValueError, match=r"weight 0: torch.float32 is sent, but .*bfloat16"):
        WeightUpdater(part).push(SoleSource(weights), 1, setup.admins)
    assert not any(entry.startswith("resume") for entry in setup.log)


class ThreadCrew:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, inbox: queue.Queue[bytes], gathering: Gathering) -> None:
        self.rank = rank
        self._inbox = inbox
        self._gathering = gathering

    def tell(self, data: bytes | None) -> bytes:
        if data is None:
            return self._inbox.get(timeout=10)
        self._inbox.put(data)
        return data

    def gather(self, data: bytes) -> list[bytes]:
        return self._gathering.exchange(self.rank, data)


class Gathering:
    """Exchanges the bytes of two threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._parts = [b"", b""]

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        self._parts[rank] = data
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


class TwoRanks:
    """An updater on rank 0, and a rank that follows.

    script, first_script: failures of the transports of rank 1 and of rank 0.
    """

    def __init__(
        self,
        script: Callable[[str], Failures] = lambda _: {},
        *,
        first_script: Callable[[str], Failures] = lambda _: {},
    ) -> None:
        inbox = queue.Queue[bytes]()
        gathering = Gathering()
        self.logs: list[list[str]] = [[], []]
        self.admins = [RecordingAdmin(url, self.logs[0], set()) for url in (A, B)]
        crews = [ThreadCrew(rank, inbox, gathering) for rank in (0, 1)]
        scripts = [first_script, script]
        self.opened_urls: list[str] = []
        self.parts = [
            RankPart(
                RecordingTransport(log, script),
                crew,
                bucket_bytes=4,
                open_admin=self._open_admin,
            )
            for log, script, crew in zip(self.logs, scripts, crews, strict=True)
        ]
        self.updater = WeightUpdater(self.parts[0])

    def _open_admin(self, engine: Engine) -> AdminClient:
        self.opened_urls.append(engine.url)
        return AdminClient(engine, create_keys())

    def push(self, version: int = 1, *, owns_any: bool = True) -> None:
        follower_source = SoleSource(lambda: iter([("b", torch.ones(1))]), owns_any=owns_any)
        thread = threading.Thread(target=self.parts[1].follow, args=(follower_source,))
        thread.start()
        try:
            source = SoleSource(lambda: iter([("a", torch.ones(1))]))
            self.updater.push(source, version, self.admins)
        finally:
            thread.join(10)
            assert not thread.is_alive()


def test_owners_begin_with_different_engines() -> None:
    ranks = TwoRanks()
    ranks.push()
    assert "send a 12" in ranks.logs[0] and "send b 21" in ranks.logs[1]
    assert ranks.updater.summary.bytes_sent == {(0, A): 4, (0, B): 4, (1, A): 4, (1, B): 4}
    assert ranks.logs[0].index("end 12") > ranks.logs[0].index("send a 12")


def test_a_rank_that_owns_nothing_connects_to_no_engine() -> None:
    ranks = TwoRanks()
    ranks.push(owns_any=False)
    assert (ranks.logs[1], ranks.opened_urls) == ([], [])


@pytest.mark.parametrize("step", ["connect", "send b"])
def test_an_engine_that_fails_for_one_rank_fails_for_all(step: str) -> None:
    """The engine has a part of the weights, so no version, and all ranks drop their lanes."""
    ranks = TwoRanks(lambda what: {B: "the broadcast broke"} if what == step else {})
    with pytest.raises(WeightUpdateFailed) as error_info:
        ranks.push()
    assert error_info.value.failures == {B: "from rank 1: the broadcast broke"}
    log = ranks.logs[0]
    assert "version 1 1" in log and "resume 1" in log
    assert "version 1 2" not in log and "resume 2" not in log
    assert "forget 2" in log and "forget 2" in ranks.logs[1]


def test_a_rank_keeps_its_client_until_rank_0_forgets_the_engine() -> None:
    ranks = TwoRanks()
    ranks.push(1)
    ranks.push(2)
    assert ranks.opened_urls == [A, B]
    ranks.updater.forget(ranks.admins[1])
    ranks.push(3)
    assert "forget 2" in ranks.logs[1]
    assert ranks.opened_urls == [A, B, B]


def test_owners_connect_to_new_engines_one_after_another() -> None:
    """A trainer that dies meanwhile leaves no engine with a request that nobody will answer."""
    events: list[str] = []

    def note(rank: int, what: str) -> Failures:
        if what == "connect":
            events.append(f"{rank} begins")
            time.sleep(0.2)
            events.append(f"{rank} ends")
        return {}

    ranks = TwoRanks(partial(note, 1), first_script=partial(note, 0))
    in_turns = ["0 begins", "0 ends", "1 begins", "1 ends"]
    ranks.push(1)
    assert events == in_turns
    events.clear()
    ranks.push(2)
    assert {event.split()[1] for event in events[:2]} == {"begins"}
    events.clear()
    ranks.updater.forget(ranks.admins[1])
    ranks.push(3)
    assert events == in_turns


def test_an_engine_that_one_owner_does_not_reach_is_no_wait_for_the_next() -> None:
    """Each owner would wait for it as long as a group may take to form."""
    ranks = TwoRanks(
        first_script=lambda what: {B: "it does not answer"} if what == "connect" else {}
    )
    with pytest.raises(WeightUpdateFailed):
        ranks.push()
    assert "connect 12" in ranks.logs[0] and "connect 1" in ranks.logs[1]
