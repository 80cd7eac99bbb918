"""Requests wait at rank 0 until a node has room for them."""

import cProfile
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import EngineSettings, RolloutSettings
from megatron_rl.records.reminder import Reminder
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorGone
from megatron_rl.rollouts.wire.messages import (
    Alive,
    EngineLeftOut,
    GroupRequest,
    slots_of_engine,
)
from sglang_bridge.engine import Engine
from tests.support.collectors import request
from tests.support.fake_engine import configuration
from tests.support.scripted_hub import ScriptedHub

# Engines run three requests at a time, and have four slots
ENGINES = [Engine(url=f"http://engine-{node}", node=node) for node in range(2)]


def idle() -> None:
    """Do nothing."""


def interrupt_after(num_calls: int) -> Callable[[], None]:
    """Return what ends a wait when it is called so often."""
    calls = iter(range(num_calls))

    def interrupt() -> None:
        if next(calls, None) is None:
            raise InterruptedError

    return interrupt


def open_queue(
    hub: ScriptedHub, engines: Sequence[Engine] = ENGINES, **changes: Any
) -> RolloutQueue:
    """Return a queue whose nodes have engines with four slots each.

    changes: of the queue.
    """
    rollout = RolloutSettings(max_new_tokens=8)
    queue = RolloutQueue(hub, rollout, **changes)  # type: ignore[arg-type]
    base = configuration()
    assert base.engine == EngineSettings(request_timeout_s=5.0, max_running_requests=3)
    queue.configure(dict.fromkeys(hub.collectors, base))
    queue.set_engines(engines)
    while any(collector.outbox for collector in hub.collectors.values()):
        queue.count_in_flight()
    return queue


def make_hub(num_nodes: int = 2) -> ScriptedHub:
    """Return a hub whose collectors complete nothing by themselves."""
    hub = ScriptedHub(0, lambda prompt_id, place: 1.0, num_nodes=num_nodes)
    hub.endless_ids = {f"g{index}" for index in range(40)}
    return hub


def requests(num: int, expected_tokens: Sequence[int] = ()) -> list[GroupRequest]:
    """Return requests for groups g0, g1 and so on, of two rollouts each."""
    lengths = expected_tokens or [0] * num
    sampling = msgspec.structs.replace(request("x").sampling, max_new_tokens=100)
    return [
        msgspec.structs.replace(request(f"g{i}"), sampling=sampling, expected_tokens=lengths[i])
        for i in range(num)
    ]


def ids_at(hub: ScriptedHub, node: int) -> list[str]:
    """Return the groups that a collector samples, in the order in which it got them."""
    return list(hub.collectors[node].running)


def report(queue: RolloutQueue, hub: ScriptedHub, node: int, message: Any) -> None:
    """Let a collector say something, and rank 0 listen."""
    hub.collectors[node].outbox.append(message)
    while hub.collectors[node].outbox:
        queue.count_in_flight()


def test_nodes_get_as_much_as_their_engines_have_room_for() -> None:
    hub = make_hub()
    queue = open_queue(hub)
    queue.submit(requests(9))
    assert [ids_at(hub, node) for node in (0, 1)] == [["g0", "g2"], ["g1", "g3"]]
    assert queue.count_in_flight() == 18


def test_the_longest_that_waits_goes_where_rollouts_have_ended() -> None:
    hub = make_hub()
    queue = open_queue(hub)
    queue.submit(requests(7, [9, 8, 7, 6, 1, 50, 2]))
    assert [ids_at(hub, node) for node in (0, 1)] == [["g5", "g1"], ["g0", "g2"]]
    report(queue, hub, 1, Alive({"g0": (0, 1)}))  # three rollouts need an engine: there is room
    assert [ids_at(hub, node) for node in (0, 1)] == [["g5", "g1"], ["g0", "g2", "g3"]]
    report(queue, hub, 0, Alive({"g5": (0, 0), "g1": (0, 2)}))
    assert ids_at(hub, 0) == ["g5", "g1", "g6"]
    report(queue, hub, 0, Alive({"g1": (7, 0), "unknown": (0, 0)}))  # of another attempt: too late
    assert "g4" not in ids_at(hub, 0) + ids_at(hub, 1)


def test_a_group_that_arrives_makes_room() -> None:
    hub = make_hub(1)
    queue = open_queue(hub, ENGINES[:1])
    queue.submit(requests(4))
    assert ids_at(hub, 0) == ["g0", "g1"]
    hub.complete(hub.collectors[0], "g1")
    report(queue, hub, 0, Alive({}))
    assert ids_at(hub, 0) == ["g0", "g2"]


def test_what_waits_is_sent_before_rank_0_does_something_else() -> None:
    hub = make_hub()
    queue = open_queue(hub)
    queue.submit(requests(9))
    queue.send_waiting()
    assert [len(ids_at(hub, node)) for node in (0, 1)] == [5, 4]


def test_groups_of_later_steps_take_no_room() -> None:
    """So an evaluation does not wait for steps that were sent ahead."""
    hub = make_hub(1)
    queue = open_queue(hub, ENGINES[:1])
    later_requests = [msgspec.structs.replace(r, step=2) for r in requests(9)]
    queue.submit(later_requests)
    queue.send_waiting()
    assert len(ids_at(hub, 0)) == 9
    hub.endless_ids |= {f"eval-{index}" for index in range(4)}
    queue.submit([request(f"eval-{index}", evaluation=True) for index in range(4)])
    assert ids_at(hub, 0)[9:] == ["eval-0", "eval-1"], "they fill the slots, and others wait"
    report(queue, hub, 0, Alive({"eval-1": (0, 0)}))
    assert ids_at(hub, 0)[11:] == ["eval-2"]
    report(queue, hub, 0, Alive({f"g{index}": (0, 0) for index in range(9)}))
    assert ids_at(hub, 0)[12:] == []


def test_dropped_and_aborted_groups_that_wait_reach_no_collector() -> None:
    hub = make_hub(1)
    queue = open_queue(hub, ENGINES[:1])
    queue.submit(requests(6))
    queue.drop(["g2"])
    assert queue.abort(["g3"], idle) == (0, 0)
    queue.drop(["g0", "g1"])
    assert ids_at(hub, 0) == ["g4", "g5"]
    queue.submit(requests(3)[2:])  # the id can be used again


def test_a_restarted_collector_gets_what_has_its_place_first() -> None:
    hub = make_hub(1)
    queue = open_queue(hub, ENGINES[:1])
    queue.submit(requests(5, [9, 8, 7, 60, 5]))
    assert ids_at(hub, 0) == ["g3", "g0"]
    hub.lose(0)
    while hub.collectors[0].outbox:
        queue.count_in_flight()
    assert ids_at(hub, 0) == ["g3", "g0"]
    assert [r.attempt for r in hub.collectors[0].running.values()] == [1, 1]
    assert queue.num_repeated == 2


def test_engines_that_leave_and_join_change_the_room() -> None:
    hub = make_hub()
    queue = open_queue(hub, ENGINES[:1])
    queue.submit(requests(12))
    assert [len(ids_at(hub, node)) for node in (0, 1)] == [2, 0]
    queue.set_engines(ENGINES)
    assert [len(ids_at(hub, node)) for node in (0, 1)] == [2, 2]
    second = Engine(url="http://another", node=1)
    queue.set_engines([*ENGINES, second])
    assert [len(ids_at(hub, node)) for node in (0, 1)] == [2, 4]
    report(queue, hub, 1, EngineLeftOut(second.url, "silent"))
    report(queue, hub, 1, Alive(dict.fromkeys(ids_at(hub, 1)[:2], (0, 0))))
    assert len(ids_at(hub, 1)) == 4, "one engine has four slots, and four rollouts need one"
    queue.set_engines([])
    queue.drop(ids_at(hub, 0))
    assert len(ids_at(hub, 0)) == 2, "an environment may need no engine"


def calls_to_submit(engines_per_node: int) -> int:
    """Return how many function calls it takes to send requests to 20 nodes."""
    hub = make_hub(20)
    places = itertools.product(hub.nodes, range(engines_per_node))
    engines = [Engine(url=f"http://engine-{node}-{index}", node=node) for node, index in places]
    queue = open_queue(hub, engines)
    profile = cProfile.Profile()
    profile.runcall(queue.submit, requests(20))
    assert len(hub.collectors[19].running) == 1
    return sum(entry.callcount for entry in profile.getstats())


def test_a_request_does_not_ask_every_node_about_the_engines_of_all() -> None:
    assert calls_to_submit(16) < 4 * calls_to_submit(1)


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_wait_names_the_groups_that_wait_for_a_node(
    monkeypatch: pytest.MonkeyPatch, is_connected: bool
) -> None:
    monkeypatch.setattr("megatron_rl.rollouts.queue.waiting.Reminder", partial(Reminder, 0.001))
    lines: list[str] = []
    hub = make_hub(1)
    queue = open_queue(hub, ENGINES[:1], log=lines.append)
    queue.submit(requests(5, [1, 2, 3, 4, 5]))
    if not is_connected:
        report(queue, hub, 0, CollectorGone(0, "it is gone"))
    with pytest.raises(InterruptedError):
        list(queue.as_completed(interrupt_after(20), idle_every_seconds=0.001))
    line = lines[-1]
    assert line.startswith("waiting for rollouts: 0 of 5 groups arrived in ")
    place = "waits for a node with room" if is_connected else "waits for a collector"
    assert f"; group g0, {place}, has taken " in line
    assert line.endswith(f"; {3 if is_connected else 5} group(s) wait for a node")


class DemandingHub(ScriptedHub):
    """Collectors also say how many rollouts need an engine, and are lost now and then."""

    loses_collectors = True

    def poll(self, timeout_seconds: float) -> Any:
        node = self.rng.choice(self.nodes)
        collector = self.collectors[node]
        if collector.running and self.rng.random() < 0.3:
            group = self.rng.choice(list(collector.running.values()))
            demand = self.rng.randint(0, group.num_samples)
            collector.outbox.append(Alive({group.group_id: (group.attempt, demand)}))
        if self.loses_collectors and self.rng.random() < 0.01:
            self.lose(node)
        return super().poll(timeout_seconds)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 25), num_nodes=st.integers(1, 3))
def test_no_group_is_lost_or_doubled_while_collectors_are_lost(
    seed: int, num: int, num_nodes: int
) -> None:
    hub = DemandingHub(seed, lambda prompt_id, place: 1.0, num_nodes=num_nodes)
    engines = [Engine(url=f"http://engine-{node}", node=node) for node in range(num_nodes)]
    queue = open_queue(hub, engines)
    lengths = random.Random(seed).choices(range(100), k=num)
    queue.submit(requests(num, lengths))
    arrivals = Counter(group.group_id for group in queue.as_completed(idle))
    assert arrivals == Counter(f"g{index}" for index in range(num))
    hub.loses_collectors = False  # `lost_groups` polls, and would not know of a loss meanwhile
    while hub.collectors and not hub.is_idle:
        queue.count_in_flight()
    lost_ids = queue.lost_groups(list(arrivals))
    assert set(arrivals) - set(lost_ids) <= hub.kept_ids
    queue.drop(list(arrivals))
    assert queue.count_in_flight() == 0


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_node_never_has_more_than_its_slots_and_one_group(num_nodes: int) -> None:
    hub = ScriptedHub(3, lambda prompt_id, place: 1.0, num_nodes=num_nodes)
    queue = open_queue(hub, ENGINES[:num_nodes])
    queue.submit(requests(30))
    for _ in queue.as_completed(idle):
        for node in range(num_nodes):
            assert len(ids_at(hub, node)) <= 2


@pytest.mark.parametrize(("running", "slots"), [(1, 2), (2, 3), (4, 5), (8, 10), (64, 80)])
def test_an_engine_has_a_request_more_than_it_runs_or_a_quarter(running: int, slots: int) -> None:
    assert slots_of_engine(running) == slots
