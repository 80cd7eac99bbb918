"""Queue of group requests, with simulated collectors."""

import queue as queue_module
import threading
import time
from collections import Counter
from collections.abc import Iterator, ValuesView
from functools import partial
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import (
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.reminder import Reminder
from megatron_rl.rollouts.hub import CollectorConnected, CollectorHub, Event
from megatron_rl.rollouts.messages import (
    AbortGroups,
    AbortRequest,
    AddEngine,
    Alive,
    Configure,
    EngineLeftOut,
    Failed,
    GroupAborted,
    GroupRequest,
    Held,
    Hold,
    Release,
    RemoveEngine,
    SetVersion,
    Stop,
    ToCollector,
    UserClassWarning,
)
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from tests.support.collectors import Observer, Peer, group_done, request, requested_ids
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import VERSION, make_rollout


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer) -> Iterator[RolloutQueue]:
    yield RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=1))


def idle() -> None:
    pass


def test_each_group_is_delivered_once_and_can_be_released(queue: RolloutQueue, peer: Peer) -> None:
    arrivals: list[tuple[str, int]] = []
    queue.on_arrival = lambda answer, seconds: arrivals.append(
        (answer.group.group_id, answer.generated_tokens)
    )
    queue.submit([request("a"), request("b")])
    assert requested_ids(peer, 2) == ["a", "b"]
    peer.send(group_done("b"))
    peer.send(group_done("a"))
    assert [g.group_id for g in queue.as_completed(idle)] == ["b", "a"]
    assert [queue.tokens_of(group_id) for group_id in ("a", "b")] == [5, 5]
    assert arrivals == [("b", 5), ("a", 5)]
    with pytest.raises(ValueError, match="once"):
        queue.submit([request("a")])
    queue.release(["a", "b"])
    assert peer.receive(1) == [Release(("a", "b"))]


def test_an_evaluation_has_nothing_to_release(queue: RolloutQueue, peer: Peer) -> None:
    for _ in range(2):
        queue.submit([request("a", evaluation=True)])
        peer.send(group_done("a"))
        assert len(list(queue.as_completed(idle))) == 1
    queue.release(["a"])
    assert not any(isinstance(message, Release) for message in peer.receive(2))


def test_requests_go_to_the_node_with_the_fewest_outstanding_rollouts(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("big", 5), request("x"), request("y"), request("z")])
    assert [requested_ids(peer, 1), requested_ids(other, 3)] == [["big"], ["x", "y", "z"]]
    other.close()


def test_outstanding_rollouts_count_when_more_are_requested(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    for turn in (
        [("a", 2), ("b", 3)],
        [("c", 1)],
        [("d", 1)],
        [("e", 1)],
        [("f", 2), ("g", 1), ("h", 1), ("i", 1)],
    ):
        queue.submit([request(name, samples) for name, samples in turn])
    assert [requested_ids(peer, 5), requested_ids(other, 4)] == [
        ["a", "c", "d", "f", "i"],
        ["b", "e", "g", "h"],
    ]
    other.close()


class OutstandingGroups(dict[str, Any]):
    """Counts how often all outstanding groups are visited."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = 0

    def values(self) -> ValuesView[Any]:
        self.visits += 1
        return super().values()


def test_an_extension_goes_to_the_node_with_few_rollouts_without_a_visit_of_all_groups(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    """Thousands of groups may be outstanding, and each of them may be extended."""
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    outstanding_groups = OutstandingGroups()
    queue._outstanding = outstanding_groups
    queue.submit([request("a", 5), request("b", 3), request("c", 4)])
    outstanding_groups.visits = 0  # of the two connections
    assert [requested_ids(peer, 1), requested_ids(other, 2)] == [["a"], ["b", "c"]]
    other.send(group_done("b"))
    assert next(queue.as_completed(idle)).group_id == "b"
    queue.submit([request("b+", 3)])
    peer.send(group_done("a"))
    assert next(queue.as_completed(idle)).group_id == "a"
    queue.submit([request("a+", 2), request("d", 9)])
    assert [requested_ids(peer, 2), requested_ids(other, 1)] == [["a+", "d"], ["b+"]]
    assert outstanding_groups.visits == 0
    other.close()


def test_rollouts_of_the_start_checkpoint_are_fresh_before_the_first_sync(
    hub: CollectorHub, peer: Peer
) -> None:
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=0))
    queue.submit([request("a")])
    peer.send(
        group_done(
            "a",
            (msgspec.structs.replace(make_ref(make_rollout(3, 4)), tokens_by_version=((0, 1),)),),
        )
    )
    (group,) = queue.as_completed(idle)
    assert len(group.rollouts) == 1


def test_idle_is_called_while_waiting(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a")])
    calls = []

    def answer_on_third_call() -> None:
        calls.append(1)
        if len(calls) == 3:
            peer.send(group_done("a"))

    assert len(list(queue.as_completed(answer_on_third_call, idle_every_seconds=0.01))) == 1
    assert len(calls) >= 3


def test_idle_is_not_called_for_each_message(queue: RolloutQueue, peer: Peer) -> None:
    """`idle` is a collective, and the requests of a frozen engine expire by the hundred."""
    queue.submit([request("a", evaluation=True)])
    for rid in range(100):
        peer.send(AbortRequest("http://e", str(rid)))
    peer.send(group_done("a"))
    calls: list[int] = []
    assert len(list(queue.as_completed(lambda: calls.append(1)))) == 1
    assert len(calls) < 5


def test_idle_is_not_called_for_each_heartbeat(queue: RolloutQueue, peer: Peer) -> None:
    """A hundred nodes send a hundred heartbeats every second."""
    queue.submit([request("a", evaluation=True)])
    calls: list[int] = []

    def live() -> None:
        for _ in range(60):
            peer.send(Alive())
            time.sleep(0.005)
        peer.send(group_done("a"))

    speaker = threading.Thread(target=live)
    speaker.start()
    assert len(list(queue.as_completed(lambda: calls.append(1), idle_every_seconds=0.1))) == 1
    speaker.join()
    assert 2 <= len(calls) < 30


def test_a_long_wait_says_what_it_waits_for_at_growing_intervals(
    hub: CollectorHub, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.rollouts.queue.Reminder", partial(Reminder, 0.1))
    lines: list[str] = []
    start = time.monotonic()

    def log(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            peer.send(group_done("b"))
            peer.send(group_done("c"))

    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=log)
    queue.submit([request("a"), request("b"), request("c")])
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle, idle_every_seconds=0.02))) == 3
    assert len(lines) == 3 and time.monotonic() - start > 0.6  # after 0.1, 0.3 and 0.7 seconds
    for line in lines:
        assert line.startswith("waiting for rollouts: 1 of 3 groups arrived in ")
        assert "; group b, requested from node 0, has taken " in line


def test_a_long_wait_names_the_number_of_engines_that_are_left_out(
    hub: CollectorHub, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.rollouts.queue.Reminder", partial(Reminder, 0.2))
    lines: list[str] = []
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=lines.append)
    queue.submit([request("a")])
    peer.send(EngineLeftOut("http://e", "500: broken"))
    threading.Timer(1.5, lambda: peer.send(group_done("a"))).start()
    assert len(list(queue.as_completed(idle, idle_every_seconds=0.02))) == 1
    assert lines[1].startswith("waiting for rollouts: 0 of 1 groups arrived")
    assert lines[1].endswith("; 1 engine(s) are left out")


# The queue's version, max_staleness, evaluation, reason to reject a rollout of version 5
VERSION_CASES = [
    (VERSION, 0, False, None),
    (VERSION + 1, 1, False, None),
    (VERSION + 2, 1, False, "stale"),
    (VERSION - 1, 1, False, "version_never_sent"),
    (0, 9, False, "version_never_sent"),
    (VERSION, 1, True, None),
    # It would count as the accuracy of weights that did not sample it
    (VERSION + 1, 1, True, "stale"),
    (VERSION - 1, 1, True, "version_never_sent"),
]


@pytest.mark.parametrize(("version", "staleness", "evaluation", "reason"), VERSION_CASES)
def test_rollouts_of_stale_or_unknown_weights_are_rejected(
    hub: CollectorHub,
    peer: Peer,
    version: int,
    staleness: int,
    evaluation: bool,
    reason: str | None,
) -> None:
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=staleness))
    queue.set_version(version)
    queue.submit([request("a", evaluation=evaluation)])
    peer.send(
        group_done("a", (msgspec.structs.replace(make_ref(make_rollout(3, 4)), num_generated=4),))
    )
    (group,) = queue.as_completed(idle)
    assert len(group.rollouts) == (0 if reason else 1)
    assert (group.rejections, group.rejected_tokens) == (
        ({reason: 1}, {reason: 4}) if reason else ({}, {})
    )


def test_one_segment_of_an_unknown_version_rejects_the_rollout(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.set_version(VERSION)
    queue.submit([request("a")])
    valid = make_ref(make_rollout(3, 4))
    ref = msgspec.structs.replace(valid, tokens_by_version=((VERSION, 1), (999, 1)))
    without_versions = msgspec.structs.replace(valid, tokens_by_version=())
    peer.send(group_done("a", (ref, valid, without_versions)))
    (group,) = queue.as_completed(idle)
    assert group.rollouts == (valid, without_versions)
    assert group.rejections == {"version_never_sent": 1}


def test_engines_that_are_left_out_are_logged_and_listed_until_they_are_added_again(
    hub: CollectorHub, peer: Peer
) -> None:
    lines: list[str] = []
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=lines.append)
    queue.add_engine(Engine(url="http://e"))
    queue.submit([request("a", evaluation=True)])
    peer.send(EngineLeftOut("http://e", "500: broken"))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    assert queue.engines_left_out == {"http://e"}
    assert lines == ["engine http://e gets no requests until it is healthy again: 500: broken"]
    queue.add_engine(Engine(url="http://e"))
    assert queue.engines_left_out == set()
    queue.engines_left_out.add("http://e")
    queue.remove_engine("http://e")
    assert queue.engines_left_out == set()


def test_a_warning_about_a_user_defined_class_is_printed(hub: CollectorHub, peer: Peer) -> None:
    lines: list[str] = []
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=lines.append)
    queue.submit([request("a")])
    peer.send(UserClassWarning("reward.name=m:C: a call ignored its cancellation"))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    assert lines == ["warning: reward.name=m:C: a call ignored its cancellation"]


def test_an_expired_request_is_aborted_in_the_background(hub: CollectorHub, peer: Peer) -> None:
    """The engine may be stopped, and then the abort waits for the timeout of the connection."""
    aborts = queue_module.Queue[tuple[str, str]]()
    hang = threading.Event()

    def abort(url: str, rid: str) -> None:
        assert threading.current_thread().daemon, "another thread would keep the process alive"
        aborts.put((url, rid))
        hang.wait(30)
        raise RequestFailed("no answer")

    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), abort=abort)
    queue.submit([request("a")])
    for rid in ("a/0#1;", "a/1#2;"):
        peer.send(AbortRequest("http://e", rid))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    assert {aborts.get(timeout=5), aborts.get(timeout=5)} == {
        ("http://e", "a/0#1;"),
        ("http://e", "a/1#2;"),
    }
    hang.set()


def test_an_expired_request_is_ignored_without_an_abort_function(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    peer.send(AbortRequest("http://e", "a/0#1;"))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1


def test_failures_of_a_collector_end_the_run(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a")])
    for message, words in (
        (Failed("the engine has gone"), "the engine has gone"),
        (group_done("b"), "unexpected GroupDone"),
    ):
        peer.send(message)
        with pytest.raises(CollectorFailed, match=words) as error:
            list(queue.as_completed(idle))
        assert isinstance(error.value, Failure) and error.value.exit_code is ExitCode.ENGINE_FAILED


@pytest.mark.parametrize("is_refusal", [True, False])
def test_the_last_report_of_a_collector_is_the_reason_of_the_failure(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, is_refusal: bool
) -> None:
    """Rank 0 was busy between the configuration and the first request."""
    peer.send(Failed("environment.name=mine:Nothing", is_refusal=is_refusal))
    peer.close(linger_seconds=5)
    code = ExitCode.REFUSED if is_refusal else ExitCode.ENGINE_FAILED
    with pytest.raises(CollectorFailed, match=r"node 0 failed: .*mine:Nothing") as error:
        submit_until_it_is_gone(queue)
    assert error.value.exit_code is code


def submit_until_it_is_gone(queue: RolloutQueue) -> None:
    for n in range(1000):
        queue.submit([request(f"group-{n}")])
        time.sleep(0.01)


def collector_configuration(path: str = "/model") -> Configure:
    return Configure(
        engines=(),
        api_key=None,
        model_path=path,
        routes=None,
        engine=EngineSettings(),
        rollout=RolloutSettings(max_new_tokens=4),
        reward=RewardSettings(),
        environment=EnvironmentSettings(),
    )


def test_every_collector_gets_its_own_configuration_and_is_told_to_end(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    ours = collector_configuration("/ours")
    theirs = collector_configuration("/theirs")
    queue.configure({0: ours, 1: theirs})
    queue.stop()
    assert [peer.receive(2), other.receive(2)] == [[ours, Stop()], [theirs, Stop()]]
    other.close()


def test_stale_rollouts_add_to_what_the_collector_rejected_as_such(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.set_version(9)
    queue.submit([request("a")])
    peer.send(
        group_done("a", (make_ref(make_rollout(3, 4)),), rejections={"stale": 2, "engine": 1})
    )
    (group,) = queue.as_completed(idle)
    assert group.rejections == {"stale": 3, "engine": 1}


def replace_collector(hub: CollectorHub, node: int, *, epoch: int = 1) -> Peer:
    """End the collector of a node as its node's report does, and connect the next one."""
    hub.disconnect(node, epoch - 1, "ended: killed by signal 9")
    peer = Peer(hub, node, epoch=epoch)
    deadline = time.monotonic() + 5
    while node not in hub.nodes:
        assert time.monotonic() < deadline
        hub._receive(0.05)
    return peer


def test_an_observer_learns_of_engines_and_collectors_that_failed(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    observer = Observer()
    queue.observer = observer
    queue.submit([request("a")])
    peer.send(EngineLeftOut("http://e", "500: broken"))
    peer.send(group_done("a"))
    list(queue.as_completed(idle))
    hub.disconnect(0, 0, "ended: killed by signal 9")
    queue.submit([])
    assert observer.failed_engines == [("http://e", "500: broken")]
    assert observer.lost_collectors == [(0, 0)]


def test_requests_of_a_lost_collector_go_to_another_node_under_the_same_ids(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("a", 3), request("b", 2), request("c", 2)])
    lost_requests = [m for m in peer.receive(1) if isinstance(m, GroupRequest)]
    assert requested_ids(other, 2) == ["b", "c"]
    hub.disconnect(0, 0, "ended: killed by signal 9")
    for name in "abc":
        other.send(group_done(name))
    assert sorted(group.group_id for group in queue.as_completed(idle)) == ["a", "b", "c"]
    repeated_requests = [m for m in other.receive(1) if isinstance(m, GroupRequest)]
    assert repeated_requests == [msgspec.structs.replace(m, attempt=1) for m in lost_requests]
    assert queue.num_repeated == 1
    other.close()


def test_requests_wait_while_no_collector_is_connected_and_go_to_the_replacement(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    hub.disconnect(0, 0, "ended: killed by signal 9")
    queue.submit([request("b")])
    replacement = replace_collector(hub, 0)
    calls: list[str] = []

    def answer() -> None:
        calls.extend(requested_ids(replacement, 2 - len(calls)))
        for name in "ab":
            if len(calls) == 2:
                replacement.send(group_done(name))

    groups = list(queue.as_completed(answer, idle_every_seconds=0.05))
    assert calls == ["a", "b"]
    assert [group.group_id for group in groups] == ["a", "b"]
    assert queue.num_repeated == 1  # "b" was never sent to the lost one
    replacement.close()


def test_late_results_of_a_lost_collector_are_not_delivered(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    replacement = replace_collector(hub, 0)
    peer.send(group_done("a", environment_error="late"))
    time.sleep(0.2)
    replacement.send(group_done("a", environment_error="new"))
    (group,) = queue.as_completed(idle)
    assert group.environment_error == "new"
    assert queue.tokens_of("a") == 5
    replacement.close()


def test_results_that_arrived_before_the_loss_are_delivered(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a"), request("b")])
    peer.send(group_done("a"))
    time.sleep(0.2)
    hub._receive(0.1)
    replacement = replace_collector(hub, 0)
    replacement.send(group_done("b"))
    assert [group.group_id for group in queue.as_completed(idle)] == ["a", "b"]
    assert requested_ids(replacement, 1) == ["b"]
    assert queue.lost_groups(["a", "b"]) == ["a"]
    replacement.close()


def test_held_groups_of_a_lost_collector_are_requested_again_once(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("a"), request("b")])
    (original,) = [m for m in peer.receive(1) if isinstance(m, GroupRequest)]
    peer.send(group_done("a"))
    other.send(group_done("b"))
    assert len(list(queue.as_completed(idle))) == 2
    assert queue.lost_groups(["a", "b", "never"]) == []
    hub.disconnect(0, 0, "ended: killed by signal 9")
    assert queue.lost_groups(["a", "b", "never"]) == ["a"]
    queue.request_again(["a"])
    other.send(group_done("a"))
    assert [group.group_id for group in queue.as_completed(idle)] == ["a"]
    requests = [m for m in other.receive(2) if isinstance(m, GroupRequest)]
    assert requests[1:] == [original]
    assert queue.lost_groups(["a", "b"]) == []
    assert queue.num_repeated == 1
    queue.release(["a", "b"])
    assert other.receive(1) == [Release(("a", "b"))]
    with pytest.raises(KeyError):
        queue.request_again(["a"])
    other.close()


def test_groups_that_are_requested_again_are_released_where_they_are(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    """A rank could not read them, although their collector is connected."""
    queue.submit([request("a")])
    peer.send(group_done("a"))
    list(queue.as_completed(idle))
    queue.request_again(["a"])
    messages = peer.receive(3)
    assert messages == [request("a"), Release(("a",)), request("a")]


def test_a_release_does_not_go_to_the_replacement_of_a_collector(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    peer.send(group_done("a"))
    list(queue.as_completed(idle))
    replacement = replace_collector(hub, 0)
    queue.submit([])
    queue.release(["a"])
    assert replacement.receive() == []
    queue.submit([request("a")])
    assert requested_ids(replacement, 1) == ["a"]
    replacement.close()


def test_loads_stay_right_when_collectors_are_lost(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("a", 5), request("b", 3)])
    hub.disconnect(0, 0, "ended: killed by signal 9")
    queue.submit([])
    assert queue._loads == {0: 0, 1: 8}
    replacement = replace_collector(hub, 0)
    queue.submit([request("c", 6)])
    assert queue._loads == {0: 6, 1: 8}
    for name in "ab":
        other.send(group_done(name))
    replacement.send(group_done("c"))
    assert len(list(queue.as_completed(idle))) == 3
    assert queue._loads == {0: 0, 1: 0}
    other.close()
    replacement.close()


def test_a_replacement_gets_the_configuration_the_version_and_the_engines_of_its_node(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    configurations = {node: collector_configuration(f"/{node}") for node in (0, 1)}
    queue.configure(configurations)
    engines = [Engine(url=f"http://{n}", node=node) for n, node in enumerate((0, 0, 0, 1))]
    for engine in engines:
        queue.add_engine(engine)
    queue.remove_engine(engines[1].url)
    queue.remove_engine("http://unknown")
    queue.set_version(4)
    assert peer.receive(6) == [
        configurations[0],
        *map(AddEngine, engines[:3]),
        RemoveEngine(engines[1].url),
        SetVersion(4),
    ]
    assert other.receive(3) == [configurations[1], AddEngine(engines[3]), SetVersion(4)]
    replacement = replace_collector(hub, 0)
    queue.submit([])
    assert replacement.receive(4) == [
        configurations[0],
        SetVersion(4),
        AddEngine(engines[0]),
        AddEngine(engines[2]),
    ]
    replacement.close()
    other.close()


def test_an_engine_that_is_added_again_is_sent_again(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([])
    engine = Engine(url="http://e")
    for _ in range(2):
        queue.add_engine(engine)
        queue.remove_engine(engine.url)
        queue.remove_engine(engine.url)
    assert peer.receive(4) == [AddEngine(engine), RemoveEngine(engine.url)] * 2


def test_an_earlier_collector_is_disconnected_by_a_report_and_no_later_one(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([])
    queue.disconnect_before(0, 0, "ended: it is the connected one")
    queue.disconnect_before(1, 5, "ended: no such node")
    assert queue.connected_nodes == [0]
    queue.disconnect_before(0, 1, "ended: killed by signal 9")
    assert queue.connected_nodes == []


def test_a_collector_gets_nothing_before_its_configuration(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    """A collector ends if anything else comes first. Two were replaced between two polls."""
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.configure({node: collector_configuration() for node in (0, 1)})
    queue.submit([request("a"), request("b")])
    replacements = [replace_collector(hub, node) for node in (0, 1)]
    queue.add_engine(Engine(url="http://e", node=1))
    queue.set_version(4)
    queue.submit([])
    firsts: list[ToCollector] = [replacement.receive(2)[0] for replacement in replacements]
    assert firsts == [collector_configuration()] * 2
    for closed_peer in (other, *replacements):
        closed_peer.close()


def test_a_collector_that_replaces_another_during_a_hold_is_held_too(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    """The new one gets the requests of the old one, and no engine may work on them."""
    queue.submit([request("a")])
    replacements: list[Peer] = []

    def abort() -> None:
        if not replacements:
            replacements.append(replace_collector(hub, 0))
        elif any(isinstance(message, Hold) for message in replacements[0].receive()):
            replacements[0].send(Held(3, 1))

    try:
        assert queue.hold(abort=abort, timeout_seconds=30) == 3
    finally:
        for replacement in replacements:
            replacement.close()


class AnsweringHub:
    """A hub whose collector answers requests in reverse order, as often as it is told."""

    def __init__(self) -> None:
        self.nodes = [0]
        self.inbox: list[tuple[int, Event]] = [(0, CollectorConnected(0))]
        self.requests: list[GroupRequest] = []

    def epoch(self, node: int) -> int:
        return 0

    def send(self, node: int, message: ToCollector) -> None:
        if isinstance(message, GroupRequest):
            self.requests.append(message)
        if isinstance(message, AbortGroups):
            (name,) = message.group_ids
            attempt = next(r.attempt for r in self.requests[::-1] if r.group_id == name)
            answer = GroupAborted(group_id=name, generated_tokens=1, attempt=attempt)
            self.inbox.append((node, answer))

    def answer_all(self) -> None:
        self.inbox += [(0, group_done(r.group_id)) for r in self.requests]
        self.requests.clear()

    def poll(self, timeout_seconds: float) -> tuple[int, Event] | None:
        return self.inbox.pop() if self.inbox else None


def test_receiving_a_step_looks_at_the_groups_of_later_steps_once() -> None:
    hub = AnsweringHub()
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4))  # type: ignore[arg-type]
    num_questions = Counter[bool]()

    def is_wanted(name: str) -> bool:
        num_questions[name in names] += 1
        return name in names

    names = {f"step-1-{index}" for index in range(4096)}
    queue.submit([request(name) for name in sorted(names)])
    queue.submit([request(f"step-2-{index}") for index in range(4096)])
    hub.answer_all()  # those of step 2 come first
    arrivals = set()
    for group in queue.as_completed(idle, is_wanted=is_wanted):
        arrivals.add(group.group_id)
        queue.submit([])  # as the sampler does
    assert arrivals == names
    assert num_questions.total() <= 4 * 4096
    assert len(list(queue.as_completed(idle))) == 4096


def test_aborted_requests_leave_nothing_behind() -> None:
    """The next request with the same id is another one."""
    hub = AnsweringHub()
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4))  # type: ignore[arg-type]
    sizes = []
    for step in range(3):
        for index in range(64):
            name = f"step-{step}-{index}"
            queue.submit([request(name)])
            assert queue.abort([name], idle) == (1, 0)
        sizes.append(len(msgspec.msgpack.encode(queue._dropped_requests)))
    assert max(sizes) - min(sizes) <= 4  # bytes of a number
    queue.submit([request("step-0-0")])
    first, again = (r for r in hub.requests if r.group_id == "step-0-0")
    assert again.attempt > first.attempt
