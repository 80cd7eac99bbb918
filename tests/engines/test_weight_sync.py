"""Versions of weights, audits, and the error when an engine holds other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from megatron_rl.config.schema import SyncSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.engines.members import Members
from megatron_rl.engines.weight_sync import FollowerSync, WeightSync
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed, WeightMismatch, WeightUpdateFailed
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import RankPlace
from sglang_bridge.weights.source import SoleSource, WeightSource
from sglang_bridge.weights.updater import UpdateSummary

WEIGHTS = {
    "model.norm.weight": torch.arange(8.0),
    "model.layers.0.self_attn.o_proj.weight": torch.eye(4),
}
NORM = "model.norm.weight"
Checksums = dict[str, str]
Change = Callable[[Checksums], Checksums]


class FakeAdmin:
    """The control client of one start of an engine, which holds the weights it was sent.

    checksums: changed by `change`, or an error.
    """

    def __init__(self, engine: Engine, fake: FakeEngine) -> None:
        self.engine = engine
        self.url = engine.url
        self.sent_checksums: Checksums = {}
        self._fake = fake

    def server_info(self) -> dict[str, Any]:
        return self._fake.info or {"device": self._fake.device}

    def checksums(self) -> list[Checksums]:
        if self._fake.audit_error is not None:
            raise self._fake.audit_error
        return [self._fake.change(self.sent_checksums)] * self._fake.tp


@dataclass
class FakeEngine:
    """An engine that holds what it was sent, after `change`.

    push_error: why it does not take weights, empty if it does. info: its `/server_info`, if it
    differs from an engine's on `device`.
    """

    name: str
    change: Change
    device: str = "cpu"
    tp: int = 1
    quantization: str | None = None
    push_error: str = ""
    audit_error: RequestFailed | None = None
    info: dict[str, Any] | None = None

    def engine(self, port: int) -> Engine:
        return Engine(url=f"http://{self.name}:{port}", tp=self.tp, quantization=self.quantization)


class FakeUpdater:
    """Sends weights to clients, and remembers the versions, names and engines."""

    def __init__(self, engines: Mapping[str, FakeEngine]) -> None:
        self.pushes: list[tuple[int, list[str]]] = []
        self.targets: list[list[str]] = []
        self.sleepers: list[list[str]] = []
        self.forgotten_admins: list[FakeAdmin] = []
        self.summary = UpdateSummary()
        self._engines = engines

    def push(self, source: WeightSource, version: int, admins: Sequence[FakeAdmin]) -> None:
        self.pushes.append((version, [name for name, _ in source.stream_owned()]))
        self.targets.append([admin.url for admin in admins])
        complete = WeightExpectation(dtype=torch.float32, num_experts=2)
        for name, tensor in WEIGHTS.items():
            complete.add(name, tensor)
        failures = {}
        for admin in admins:
            admin.sent_checksums = complete.checksums()
            error = self._engines[admin.url.split("//")[1].split(":")[0]].push_error
            if error:
                failures[admin.url] = error
        if failures:
            raise WeightUpdateFailed(version, failures, [])

    def sleep(self, admins: Sequence[FakeAdmin]) -> None:
        self.sleepers.append([admin.url for admin in admins])

    def forget(self, admin: FakeAdmin) -> None:
        self.forgotten_admins.append(admin)

    def close(self) -> None:
        pass


def source() -> SoleSource:
    return SoleSource(lambda: iter(WEIGHTS.items()))


def no_change(checksums: Checksums) -> Checksums:
    return checksums


def with_other_norm(checksums: Checksums) -> Checksums:
    return checksums | {NORM: "0" * 16}


def without_norm(checksums: Checksums) -> Checksums:
    return {name: value for name, value in checksums.items() if name != NORM}


def with_extra_bias(checksums: Checksums) -> Checksums:
    return checksums | {"model.layers.0.bias": "1" * 16}


class Run:
    """Engines "a", "b", ... of a run that wait for weights."""

    def __init__(
        self,
        *engines: FakeEngine,
        audit_every: int = 3,
        transport: Literal["distributed", "ipc"] = "distributed",
        is_colocated: bool = False,
    ) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.updater = FakeUpdater(self.engines)
        self.members = Members()
        self.lines: list[str] = []
        self.compares_values: list[bool] = []  # of each audit
        self.opened_admins: list[FakeAdmin] = []
        for name, engine in self.engines.items():
            self.members.add(name, engine.engine(1))
            self.members.answer(name, 0)
        fake_updater: Any = self.updater
        open_admin: Any = self._open_admin
        self.sync = WeightSync(
            fake_updater,
            SyncSettings(audit_every=audit_every, transport=transport),
            self.members,
            make_expectation=self._make_expectation,
            open_admin=open_admin,
            log=self.lines.append,
            is_colocated=is_colocated,
        )

    def states(self) -> dict[str, str]:
        return {member.name: member.state.value for member in self.members}

    def join(self, *names: str) -> dict[str, float]:
        """Send the current weights to engines that answer again."""
        for name in names:
            self.members.answer(name, self.members[name].epoch)
        version = self.sync.version
        assert version is not None
        return self.sync.send(Sync(version, audit=True, only=names), source())

    def _open_admin(self, engine: Engine) -> FakeAdmin:
        name = engine.url.split("//")[1].split(":")[0]
        self.opened_admins.append(FakeAdmin(engine, self.engines[name]))
        return self.opened_admins[-1]

    def _make_expectation(
        self, *, compares_values: bool, places: Iterable[RankPlace]
    ) -> WeightExpectation:
        self.compares_values.append(compares_values)
        return WeightExpectation(
            dtype=torch.float32, num_experts=2, compares_values=compares_values, places=places
        )


def make_sync(
    change: Change = no_change, *, device: str = "cpu", audit_every: int = 3
) -> tuple[WeightSync, Run]:
    run = Run(FakeEngine("a", change, device), audit_every=audit_every)
    return run.sync, run


def two_engines(change: Change = no_change, *, audit_every: int = 1) -> Run:
    """Engine "a" is fine, and "b" holds what `change` makes of its weights."""
    return Run(FakeEngine("a", no_change), FakeEngine("b", change), audit_every=audit_every)


def send(sync: WeightSync) -> dict[str, float]:
    return sync.send(sync.next_command(), source())


def without_costs(values: dict[str, float]) -> dict[str, float]:
    costs = ("sync/bytes", "time/")
    return {name: value for name, value in values.items() if not name.startswith(costs)}


def test_versions_count_up_and_the_first_sync_is_audited() -> None:
    sync, run = make_sync(audit_every=3)
    is_audited = ["sync/audit_mismatches" in send(sync) for _ in range(7)]
    assert is_audited == [True, False, False, True, False, False, True]
    assert run.updater.pushes == [(version, list(WEIGHTS)) for version in range(7)]


@pytest.mark.parametrize(
    ("audit_every", "audits"), [(0, [True, False, False]), (1, [True, True, True])]
)
def test_the_first_sync_is_audited_for_every_interval(audit_every: int, audits: list[bool]) -> None:
    sync, _ = make_sync(audit_every=audit_every)
    commands = []
    for _ in range(3):
        commands.append(sync.next_command())
        sync.send(commands[-1], source())
    assert [command.audit for command in commands] == audits


def test_an_audit_counts_the_compared_parameters() -> None:
    sync, _ = make_sync()
    assert without_costs(send(sync)) == {
        "sync/version": 0.0,
        "sync/engines": 1.0,
        "sync/audit_mismatches": 0.0,
        "sync/audit_compared": 2.0,
    }


def test_an_audit_counts_the_parameters_of_all_engines() -> None:
    run = two_engines()
    values = send(run.sync)
    assert run.sync.audit_obstacle == ""
    assert (values["sync/audit_compared"], values["sync/engines"]) == (4.0, 2.0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (with_other_norm, NORM),
        (without_norm, NORM),
        (with_extra_bias, "model.layers.0.bias"),
    ],
    ids=["other value", "missing in the engine", "never sent"],
)
def test_a_difference_is_an_error_that_names_the_tensor(change: Change, name: str) -> None:
    sync, run = make_sync(change)
    with pytest.raises(WeightMismatch, match=name) as failure:
        send(sync)
    assert failure.value.exit_code == 6
    assert run.updater.pushes == [(0, list(WEIGHTS))]


def test_a_difference_names_the_version() -> None:
    sync, _ = make_sync(with_other_norm, audit_every=2)
    for _ in range(2):
        sync.next_command()
    with pytest.raises(WeightMismatch) as failure:
        send(sync)
    assert failure.value.version == 2


def test_engines_that_cannot_be_audited_by_value_are_compared_by_name_once() -> None:
    sync, run = make_sync(device="cuda", audit_every=1)
    assert without_costs(send(sync)) == {"sync/version": 0.0, "sync/engines": 1.0}
    assert "device=cuda" in sync.audit_obstacle
    assert without_costs(send(sync)) == {"sync/version": 1.0, "sync/engines": 1.0}
    assert len(run.updater.pushes) == 2


def test_names_are_audited_again_where_values_cannot_be_compared() -> None:
    run = Run(FakeEngine("a", no_change, "cuda"), FakeEngine("b", no_change, "cuda"), audit_every=1)
    send(run.sync)
    run.engines["b"].change = without_norm
    send(run.sync)
    assert run.states() == {"a": "serving", "b": "out"}
    assert "model.norm.weight (the engine has no such" in run.members["b"].reason


def test_values_are_not_hashed_where_they_cannot_be_compared() -> None:
    sync, run = make_sync(device="cuda", audit_every=1)
    for _ in range(2):
        send(sync)
    sharded_run = Run(FakeEngine("a", no_change, tp=2, quantization="awq"))
    send(sharded_run.sync)
    assert "awq" in sharded_run.sync.audit_obstacle
    assert run.compares_values == [True, False]
    assert sharded_run.compares_values == [False]


def test_a_missing_name_is_an_error_without_an_audit_by_value() -> None:
    sync, _ = make_sync(without_norm, device="cuda")
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight \(the engine has no such"):
        send(sync)


def test_every_engine_is_audited() -> None:
    run = two_engines(with_other_norm)
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight .*0000"):
        send(run.sync)


@pytest.mark.parametrize("error", ["push", "audit"])
def test_the_first_sync_needs_every_engine(error: str) -> None:
    """An engine that never worked is a mistake in the settings."""
    run = two_engines()
    if error == "push":
        run.engines["b"].push_error = "no such interface"
        with pytest.raises(WeightUpdateFailed, match=r"http://b:1: no such interface"):
            send(run.sync)
    else:
        run.engines["b"].audit_error = RequestFailed("http://b:1 does not answer")
        with pytest.raises(RequestFailed, match="http://b:1 does not answer"):
            send(run.sync)
    assert run.members.serving == []


@pytest.mark.parametrize("error", ["push", "audit", "other weights"])
def test_an_engine_that_fails_in_a_later_sync_is_out_and_the_others_serve(error: str) -> None:
    run = two_engines()
    send(run.sync)
    if error == "push":
        run.engines["b"].push_error = "it died"
    elif error == "audit":
        run.engines["b"].audit_error = RequestFailed("it died")
    else:
        run.engines["b"].change = with_other_norm
    values = send(run.sync)
    assert run.states() == {"a": "serving", "b": "out"}
    assert run.members["a"].version == 1 and run.members["b"].version is None
    assert values["sync/engines"] == 1.0
    (line,) = run.lines
    assert line.startswith("engine b is out: ")
    assert ("it died" if error != "other weights" else NORM) in line
    assert run.sync.is_current


def test_every_sync_by_ipc_is_audited() -> None:
    run = Run(FakeEngine("a", no_change), audit_every=3, transport="ipc")
    assert ["sync/audit_compared" in send(run.sync) for _ in range(4)] == [True] * 4


def test_engines_that_are_out_sleep_too_and_those_that_are_gone_cannot() -> None:
    run = Run(*(FakeEngine(name, no_change) for name in "abc"), is_colocated=True)
    send(run.sync)
    assert run.sync.is_current
    run.members.fail("b", 0, "no answer")
    run.members.leave("c", "given up")
    run.sync.sleep()
    assert run.updater.sleepers == [["http://a:1", "http://b:1"]]
    assert not run.sync.is_current, "no engine may join meanwhile"


def test_a_colocated_engine_that_takes_no_weights_ends_the_run() -> None:
    """The engine keeps memory that the trainer needs."""
    run = Run(FakeEngine("a", no_change), FakeEngine("b", no_change), is_colocated=True)
    send(run.sync)
    run.engines["b"].push_error = "no room"
    with pytest.raises(WeightUpdateFailed, match="no room"):
        send(run.sync)


def test_a_colocated_engine_with_other_weights_ends_the_run() -> None:
    run = Run(FakeEngine("a", no_change), FakeEngine("b", no_change), is_colocated=True)
    send(run.sync)
    run.engines["b"].change = with_other_norm
    with pytest.raises(WeightMismatch):
        for _ in range(3):
            send(run.sync)


def test_an_engine_that_joins_gets_the_current_version_alone() -> None:
    run = two_engines()
    send(run.sync)
    run.engines["b"].push_error = "it died"
    send(run.sync)
    run.engines["b"].push_error = ""
    values = run.join("b")
    assert run.updater.targets == [["http://a:1", "http://b:1"]] * 2 + [["http://b:1"]]
    assert [version for version, _ in run.updater.pushes] == [0, 1, 1]
    assert run.states() == {"a": "serving", "b": "serving"}
    assert run.members["b"].version == 1
    assert (values["sync/engines"], values["sync/audit_compared"]) == (2.0, 2.0)
    assert run.sync.next_command().version == 2


def test_an_engine_that_left_before_its_sync_gets_no_weights() -> None:
    """The export runs on all ranks all the same."""
    run = two_engines()
    send(run.sync)
    run.members.fail("b", 0, "it died")
    run.sync.send(Sync(0, audit=True, only=("b",)), source())
    assert run.updater.targets[-1] == []
    assert run.updater.pushes[-1] == (0, list(WEIGHTS))
    assert run.states() == {"a": "serving", "b": "out"}


def test_an_engine_that_was_started_again_has_another_client() -> None:
    run = two_engines()
    send(run.sync)
    old_admin = run.opened_admins[1]
    run.members.start("b", run.engines["b"].engine(2), 1, "it died")
    run.join("b")
    assert run.updater.targets[-1] == ["http://b:2"]
    assert run.updater.forgotten_admins == [old_admin]
    assert len(run.opened_admins) == 3


def test_connections_to_engines_that_are_out_are_dropped() -> None:
    run = two_engines()
    send(run.sync)
    run.members.fail("b", 0, "it died")
    send(run.sync)
    assert run.updater.forgotten_admins == [run.opened_admins[1]]


def test_an_engine_that_waits_is_audited_in_a_sync_of_all() -> None:
    """An engine that was started again holds weights that nobody has compared."""
    run = two_engines(audit_every=0)
    send(run.sync)
    run.members.start("b", run.engines["b"].engine(2), 1, "it died")
    run.members.answer("b", 1)
    run.engines["b"].change = with_other_norm
    send(run.sync)
    assert run.states() == {"a": "serving", "b": "out"}
    assert not run.sync.next_command().audit


def test_an_engine_with_other_weights_does_not_end_a_run_that_has_another_one() -> None:
    """The engine fails each time: when it joins, and in the syncs of all."""
    run = two_engines()
    send(run.sync)
    run.engines["b"].change = with_other_norm
    for _ in range(3):
        send(run.sync)
        assert run.states() == {"a": "serving", "b": "out"}
        run.join("b")
        assert run.states() == {"a": "serving", "b": "out"}
        run.members.answer("b", 0)


def test_the_only_engine_may_hold_other_weights_once() -> None:
    run = Run(FakeEngine("a", no_change), audit_every=1)
    send(run.sync)
    run.engines["a"].change = with_other_norm
    send(run.sync)
    assert run.states() == {"a": "out"}
    with pytest.raises(WeightMismatch, match=NORM) as error:
        run.join("a")
    assert error.value.exit_code == 6


def test_a_good_audit_forgives_the_one_before() -> None:
    run = Run(FakeEngine("a", no_change), audit_every=1)
    send(run.sync)
    for _ in range(3):
        run.engines["a"].change = with_other_norm
        send(run.sync)
        run.engines["a"].change = no_change
        run.join("a")
        assert run.states() == {"a": "serving"}


def test_weights_are_current_until_the_trainer_changes_its_own() -> None:
    run = two_engines()
    assert not run.sync.is_current
    send(run.sync)
    assert run.sync.is_current
    run.sync.expire()
    assert not run.sync.is_current


def test_a_resumed_run_continues_the_versions() -> None:
    for version, is_synced, next_version in ((None, False, 0), (4, True, 4), (4, False, 5)):
        sync, _ = make_sync()
        sync.resume_from(version, is_synced=is_synced)
        assert sync.next_command().version == next_version


class FakePart:
    """A rank's part, which consumes what the rank owns."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def follow(self, source: WeightSource) -> None:
        self.names += [name for name, _ in source.stream_owned()]


@pytest.mark.parametrize("audit", [False, True])
def test_a_follower_sends_what_it_owns_and_streams_once_more_for_an_audit(audit: bool) -> None:
    part: Any = FakePart()
    streams: list[str] = []

    class Source(SoleSource):
        def stream_all(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().stream_all():
                streams.append(name)
                yield name, tensor

    follower_source = Source(lambda: iter(WEIGHTS.items()))
    assert FollowerSync(part).send(Sync(version=0, audit=audit), follower_source) == {}
    assert part.names == list(WEIGHTS)
    assert streams == (list(WEIGHTS) if audit else [])


def test_a_first_sync_that_fails_still_streams_for_its_audit() -> None:
    """The other ranks do: they would wait for ever."""
    run = two_engines()
    run.engines["b"].push_error = "no such interface"
    streams: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            streams.append(name)
            yield name, tensor

    with pytest.raises(WeightUpdateFailed):
        run.sync.send(run.sync.next_command(), SoleSource(stream))
    assert streams == 2 * list(WEIGHTS)


def test_the_costs_of_a_sync_are_metrics() -> None:
    run = two_engines()
    run.updater.summary = UpdateSummary(
        {"gather": 0.5, "send": 2.0},
        {(0, "http://a:1"): 10, (0, "http://b:1"): 20, (3, "http://a:1"): 5},
    )
    values = send(run.sync)
    costs = {name: value for name, value in values.items() if name.startswith("sync/bytes")}
    assert costs == {
        "sync/bytes": 35.0,
        "sync/bytes/0": 30.0,
        "sync/bytes/3": 5.0,
        "sync/bytes/0/a": 10.0,
        "sync/bytes/0/b": 20.0,
        "sync/bytes/3/a": 5.0,
    }
    times = {name for name in values if name.startswith("time/")}
    assert times == {"time/sync/gather", "time/sync/send", "time/sync/audit"}


def test_hundreds_of_links_are_not_listed_one_by_one() -> None:
    run = two_engines()
    run.updater.summary = UpdateSummary({}, {(rank, "http://a:1"): 1 for rank in range(65)})
    costs = {name for name in send(run.sync) if name.startswith("sync/bytes")}
    assert costs == {"sync/bytes", *(f"sync/bytes/{rank}" for rank in range(65))}


@pytest.mark.parametrize("info", [{"status": "busy"}, {"device": None}, {"device": ["cpu"]}])
def test_an_audited_engine_without_a_device_is_out_and_others_are_compared(
    info: dict[str, Any],
) -> None:
    run = two_engines()
    send(run.sync)
    run.engines["b"].info = info
    values = send(run.sync)
    assert run.states() == {"a": "serving", "b": "out"}
    assert (run.sync.audit_obstacle, values["sync/audit_compared"]) == ("", 2.0)
    assert "names no device" in run.members["b"].reason
