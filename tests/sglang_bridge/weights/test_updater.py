"""Order and failures of a weight update, with engines and a transport that record calls."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed, WeightUpdateFailed
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import Failures
from sglang_bridge.weights.updater import WeightUpdater

A = "http://127.0.0.1:1"
B = "http://127.0.0.1:2"


class RecordingAdmin(AdminClient):
    """Records control calls. failing_calls: the names of calls that fail."""

    def __init__(self, url: str, log: list[str], failing_calls: set[str]) -> None:
        super().__init__(Engine(url=url), create_keys())
        self._log = log
        self._failing_calls = failing_calls

    def _call(self, name: str) -> None:
        self._log.append(f"{name} {self.url[-1]}")
        if name in self._failing_calls:
            raise RequestFailed(f"{name} refused")

    def pause(self) -> None:
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")

    def flush_cache(self) -> None:
        self._call("flush")

    def end_weight_update(self) -> None:
        self._call("end-old")


class RecordingTransport:
    """Records its calls. `script` may add failures."""

    device = torch.device("cpu")

    def __init__(self, log: list[str], script: Callable[[str], Failures]) -> None:
        self._log = log
        self._script = script

    def _record(self, what: str, admins: Sequence[AdminClient]) -> Failures:
        self._log.append(f"{what} {''.join(admin.url[-1] for admin in admins)}")
        return self._script(what)

    def connect(self, admins: Sequence[AdminClient]) -> Failures:
        return self._record("connect", admins)

    def begin(self, admins: Sequence[AdminClient], version: int) -> Failures:
        return self._record("begin", admins)

    def send(self, bucket: Bucket, admins: Sequence[AdminClient], version: int) -> Failures:
        return self._record(
            f"send {','.join(bucket.names)}{' last' if bucket.last else ''}", admins
        )

    def end(self, admins: Sequence[AdminClient], version: int) -> Failures:
        return self._record("end", admins)

    def forget(self, admin: AdminClient) -> None:
        self._log.append(f"forget {admin.url[-1]}")

    def close(self) -> None:
        self._log.append("close")


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
        self.updater = WeightUpdater(transport=RecordingTransport(self.log, script), bucket_bytes=4)

    def push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Send weights to both engines."""
        self.updater.push(weights, version, self.admins)

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
    assert log[2:7] == ["connect 12", "begin 12", "send 0 12", "send 1 last 12", "end 12"]
    assert (set(log[7:9]), set(log[9:])) == ({"flush 1", "flush 2"}, {"resume 1", "resume 2"})


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
    assert log[6:] == [
        "send 0 12",
        "send 1 2",
        "send 2 last 2",
        "end 2",
        "flush 2",
        "resume 2",
        "forget 1",
    ]


def test_the_stream_is_exhausted_even_when_every_engine_fails() -> None:
    setup = Setup(lambda what: {A: "x", B: "x"} if what == "begin" else {})
    reads: list[str] = []
    with pytest.raises(WeightUpdateFailed):
        setup.push(weights(4, reads), 1)
    assert len(reads) == 4
    assert not any(entry.startswith(("send", "resume")) for entry in setup.log)


def test_the_stream_is_exhausted_even_when_the_transport_breaks() -> None:
    def script(what: str) -> Failures:
        raise RuntimeError("no such interface")

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
    updater = WeightUpdater(transport=RecordingTransport(log, begin), bucket_bytes=4)
    updater.push(weights(), 0, admins)
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
    setup.updater.push(weights(), 0, setup.admins[1:])
    log = setup.take_log()
    assert log == [
        "pause 2",
        "connect 2",
        "begin 2",
        "send 0 2",
        "send 1 last 2",
        "end 2",
        "flush 2",
        "resume 2",
    ]
    setup.push(weights(), 1)
    assert not any(entry.startswith("end-old") for entry in setup.log)


def test_the_stream_is_exhausted_without_an_engine() -> None:
    """The other ranks export too, while every engine is out."""
    setup = Setup()
    reads: list[str] = []
    setup.updater.push(weights(3, reads), 1, [])
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
        WeightUpdater(transport=RecordingTransport([], lambda _: {}), bucket_bytes=0)
