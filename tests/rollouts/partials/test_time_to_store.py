"""The time that a checkpoint may take to store open responses, with processes that hang."""

import math
import re
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.engines.connections import EngineConnections, StoredPartials
from megatron_rl.engines.on_update import OnUpdate, open_steps_ahead
from megatron_rl.engines.time_to_store import TimeToStore
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import create_keys
from tests.support.clocks import FakeClock
from tests.support.collectors import Peer, request
from tests.support.stop_requests import ScriptedStop


def idle() -> None:
    pass


def connect(hub: CollectorHub, log: Any, *engines: Engine) -> EngineConnections:
    """Return rank 0's connections to one open request and to engines."""
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=log)
    queue.submit([request("a")])
    members = [SimpleNamespace(engine=engine) for engine in engines]
    fleet: Any = SimpleNamespace(members=SimpleNamespace(serving=members))
    nothing: Any = None
    return EngineConnections(
        queue,
        weights=nothing,
        token_counter=nothing,
        fleet=fleet,
        open_admin=lambda engine: AdminClient(engine, create_keys(), timeout=5),
    )


def look_every_second(
    time_to_store: TimeToStore, clock: FakeClock, count: int
) -> list[tuple[bool, bool]]:
    """Return whether the time is over for engines and for collectors, at each look."""
    results = []
    for _ in range(count):
        results.append((time_to_store.is_over_for_engines(), time_to_store.is_over()))
        clock.now += 1
    return results


def test_half_of_the_time_to_stop_belongs_to_the_checkpoint_itself() -> None:
    clock = FakeClock()
    seconds_to_stop = ScriptedStop(18.0, clock=clock)
    seconds_to_stop.request()
    clock.now += 6
    time_to_store = TimeToStore(seconds_to_stop, clock=clock)
    results = look_every_second(time_to_store, clock, 8)
    # 12 s are left: 2 s for engines, 6 s in all
    assert results == [(False, False)] * 3 + [(True, False)] * 4 + [(True, True)]


def test_a_stop_request_that_comes_later_starts_the_time() -> None:
    clock = FakeClock()
    seconds_to_stop = ScriptedStop(18.0, clock=clock)
    time_to_store = TimeToStore(seconds_to_stop, clock=clock)
    clock.now += 1000
    assert not time_to_store.is_over_for_engines() and not time_to_store.is_over()
    seconds_to_stop.request()
    results = look_every_second(time_to_store, clock, 11)
    assert results == [(False, False)] * 4 + [(True, False)] * 6 + [(True, True)]


def test_a_stop_request_without_a_limit_takes_no_time_away() -> None:
    seconds_to_stop = ScriptedStop()
    seconds_to_stop.request()
    time_to_store = TimeToStore(seconds_to_stop)
    assert not time_to_store.is_over_for_engines() and not time_to_store.is_over()


def test_a_limit_that_comes_after_the_request_starts_the_time() -> None:
    """The file `stop`, or SIGUSR1, sets no limit outside of Slurm. SIGTERM does."""
    clock = FakeClock()
    limits: list[float | None] = [None, math.inf]
    time_to_store = TimeToStore(lambda: limits[-1], clock=clock)
    clock.now += 1000
    assert not time_to_store.is_over_for_engines() and not time_to_store.is_over()
    limits.append(12.0)
    results = look_every_second(time_to_store, clock, 8)
    assert results == [(False, False)] * 3 + [(True, False)] * 4 + [(True, True)]


@pytest.mark.parametrize("comes_later", [False, True])
def test_a_collector_that_hangs_takes_no_more_time_than_there_is(
    hub: CollectorHub, peer: Peer, comes_later: bool
) -> None:
    lines: list[str] = []
    connections = connect(hub, lines.append)
    seconds_to_stop = ScriptedStop(3.0, clock=time.monotonic)
    start = time.monotonic()
    if comes_later:
        timer = threading.Timer(1.0, seconds_to_stop.request)
        timer.start()
    else:
        seconds_to_stop.request()
    assert connections.store_partials(idle, seconds_to_stop) == StoredPartials((), 0)
    seconds = time.monotonic() - start - comes_later
    assert 1.4 < seconds < 9  # of the 70 s of another checkpoint
    (limit,) = re.findall(r"did not store all of their open rollouts within (\d+\.\d) s", lines[-1])
    assert 0.5 < float(limit) < 9


def test_an_engine_that_hangs_takes_no_more_time_than_there_is(
    hub: CollectorHub, peer: Peer
) -> None:
    """The engine accepts connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = Engine(url=f"http://127.0.0.1:{server.getsockname()[1]}", node=0)
        lines: list[str] = []
        connections = connect(hub, lines.append, engine)
        seconds_to_stop = ScriptedStop(3.0, clock=time.monotonic)
        seconds_to_stop.request()
        start = time.monotonic()
        assert connections.store_partials(idle, seconds_to_stop) == StoredPartials((), 0)
        assert 1.4 < time.monotonic() - start < 4.5  # one unlimited call takes 5 s


class Control:
    """Notes how often open responses are stored, and counts new tokens."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_held = False
        self.num_new_tokens = 0

    def interrupt(self, idle: Any) -> int:
        self.is_held = True
        num_tokens = self.num_new_tokens
        self.num_new_tokens = 0
        return num_tokens

    def proceed(self) -> None:
        self.is_held = False

    def store_partials(self, idle: Any, seconds_to_stop: Any) -> StoredPartials:
        self.num_calls += 1
        return StoredPartials((), 3)


SETTINGS = RolloutSettings(max_new_tokens=4, max_staleness=1, on_update="resume")


@pytest.mark.parametrize("is_stopping", [False, True])
def test_open_responses_are_stored_at_each_checkpoint(is_stopping: bool) -> None:
    control: Any = Control()
    source: Any = SimpleNamespace(open_steps=(7,), open_groups=lambda groups: {7: groups})
    parts: OnUpdate
    _, parts = open_steps_ahead(SETTINGS, control, idle)
    seconds_to_stop = ScriptedStop()
    if is_stopping:
        seconds_to_stop.request()
    for _ in range(2):
        assert parts.before_save(source, seconds_to_stop) == {7: ()}
    assert control.num_calls == 2
    assert parts.num_uncounted == 6


def test_tokens_that_are_completed_for_a_checkpoint_are_counted_with_it() -> None:
    """A user-defined environment cannot continue an episode, so open ones are completed."""
    control: Any = Control()
    source: Any = SimpleNamespace(open_steps=())
    parts: OnUpdate
    _, parts = open_steps_ahead(SETTINGS, control, idle, stores_partials=False)
    control.num_new_tokens = 30
    seconds_to_stop = ScriptedStop()
    assert parts.before_save(source, seconds_to_stop) == {}
    assert parts.num_uncounted == 30 and not control.is_held
    control.num_new_tokens = 12
    failed_source: Any = SimpleNamespace(
        open_steps=(7,), state=lambda: None, finish_step=lambda _: None
    )
    assert parts.before_save(failed_source, seconds_to_stop) == {}
    assert parts.num_uncounted == 30  # what is still open could take long
    seconds_to_stop.request()
    assert parts.before_save(source, seconds_to_stop) == {}
    assert parts.num_uncounted == 30  # nothing was completed, and there is no time to ask
    assert parts.before_sync(source) == 42 and parts.num_uncounted == 0
