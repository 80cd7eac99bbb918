"""Queue of group requests, with simulated collectors."""

import queue as queue_module
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

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
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorConnected, CollectorHub, Event
from megatron_rl.rollouts.queue.ledger import GroupEntry, GroupLedger, GroupState
from megatron_rl.rollouts.wire.messages import (
    AbortRequests,
    Alive,
    Configure,
    Drop,
    Dropped,
    EngineLeftOut,
    GroupRequest,
    Problem,
    Serve,
    Served,
    Stop,
    ToCollector,
)
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
    queue.drop(["a", "b"])
    assert peer.receive(1) == [Drop(("a", "b"))]


def test_an_evaluation_has_nothing_to_release(queue: RolloutQueue, peer: Peer) -> None:
    for _ in range(2):
        queue.submit([request("a", evaluation=True)])
        peer.send(group_done("a"))
        assert len(list(queue.as_completed(idle))) == 1
    queue.drop(["a"])
    assert not any(isinstance(message, Drop) for message in peer.receive(2))


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


def test_an_extension_goes_to_the_node_with_few_rollouts_without_a_visit_of_all_groups(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of groups may be open, and each of them may be extended."""
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("a", 5), request("b", 3), request("c", 4)])
    assert [requested_ids(peer, 1), requested_ids(other, 2)] == [["a"], ["b", "c"]]
    other.send(group_done("b"))
    assert next(queue.as_completed(idle)).group_id == "b"
    visited_ids: list[str] = []
    visit = GroupLedger.in_states

    def note_visits(ledger: GroupLedger, *states: GroupState) -> Iterator[GroupEntry]:
        for entry in visit(ledger, *states):
            visited_ids.append(entry.id)
            yield entry

    monkeypatch.setattr(GroupLedger, "in_states", note_visits)
    queue.submit([request("b+", 3)])
    assert visited_ids == ["b+"]
    queue.count_in_flight()
    assert set(visited_ids) == {"a", "b+", "c"}, "the test sees visits"
    assert requested_ids(other, 1) == ["b+"]
    other.close()


def test_a_group_that_is_dropped_although_nobody_asked_ends_the_run(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    peer.send(Dropped(group_id="a", generated_tokens=3))
    with pytest.raises(CollectorFailed, match="unexpected Dropped"):
        list(queue.as_completed(idle))


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
        peer.send(AbortRequests("http://e", (str(rid),)))
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
    monkeypatch.setattr("megatron_rl.rollouts.queue.waiting.Reminder", partial(Reminder, 0.1))
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
    monkeypatch.setattr("megatron_rl.rollouts.queue.waiting.Reminder", partial(Reminder, 0.2))
    lines: list[str] = []
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=lines.append)
    queue.submit([request("a")])
    peer.send(EngineLeftOut("http://e", "500: broken"))
    threading.Timer(1.5, lambda: peer.send(group_done("a"))).start()
    assert len(list(queue.as_completed(idle, idle_every_seconds=0.02))) == 1
    assert lines[1].startswith("waiting for rollouts: 0 of 1 groups arrived")
    assert lines[1].endswith("; 1 engine(s) get no requests")


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
    engine = Engine(url="http://e")
    queue.set_engines([engine])
    queue.submit([request("a", evaluation=True)])
    peer.send(EngineLeftOut("http://e", "500: broken"))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    assert queue.engines_left_out == {"http://e"}
    assert lines == ["engine http://e gets no requests until it is healthy again: 500: broken"]
    queue.set_engines([engine, Engine(url="http://other")])
    assert queue.engines_left_out == {"http://e"}
    queue.set_engines([])
    queue.set_engines([engine])
    assert queue.engines_left_out == set()


def test_a_warning_about_a_user_defined_class_is_printed(hub: CollectorHub, peer: Peer) -> None:
    lines: list[str] = []
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=lines.append)
    queue.submit([request("a")])
    peer.send(Problem("reward.name=m:C: a call ignored its cancellation"))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    assert lines == ["warning: reward.name=m:C: a call ignored its cancellation"]


def test_an_expired_request_is_aborted_in_the_background(hub: CollectorHub, peer: Peer) -> None:
    """The engine may be stopped, and then the abort waits for the timeout of the connection."""
    aborts = queue_module.Queue[tuple[str, str]]()
    hang = threading.Event()

    def abort(url: str, name: str) -> None:
        assert threading.current_thread().daemon, "another thread would keep the process alive"
        aborts.put((url, name))
        if name != "a/0#1;":
            hang.wait(30)
            raise RequestFailed("no answer")

    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), abort=abort)
    queue.submit([request("a")])
    names = [f"a/{i}#{i + 1};" for i in range(40)]
    for part in (names[:39], names[39:]):
        peer.send(AbortRequests("http://e", tuple(part)))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    # The first one is answered. The others of its message are sent several at a time
    asked_names = [aborts.get(timeout=5) for _ in range(10)]
    assert set(asked_names) == {("http://e", name) for name in (*names[:9], names[39])}
    time.sleep(0.05)
    assert aborts.empty()
    hang.set()
    time.sleep(0.05)
    assert aborts.empty(), "an engine that does not answer is not asked for the others"


def test_all_requests_of_a_message_are_aborted(hub: CollectorHub, peer: Peer) -> None:
    aborts = queue_module.Queue[str]()
    queue = RolloutQueue(
        hub, RolloutSettings(max_new_tokens=4), abort=lambda url, name: aborts.put(name)
    )
    queue.submit([request("a")])
    names = tuple(f"a/{i}#{i};" for i in range(40))
    peer.send(AbortRequests("http://e", names))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    assert sorted(aborts.get(timeout=5) for _ in names) == sorted(names)


def test_an_expired_request_is_ignored_without_an_abort_function(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    peer.send(AbortRequests("http://e", ("a/0#1;",)))
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(idle))) == 1


def test_failures_of_a_collector_end_the_run(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a")])
    for message, words in (
        (Problem("the engine has gone", ExitCode.ENGINE_FAILED), "the engine has gone"),
        (group_done("b"), "unexpected GroupDone"),
    ):
        peer.send(message)
        with pytest.raises(CollectorFailed, match=words) as error:
            list(queue.as_completed(idle))
        assert isinstance(error.value, Failure) and error.value.exit_code is ExitCode.ENGINE_FAILED


@pytest.mark.parametrize("code", [ExitCode.REFUSED, ExitCode.ENGINE_FAILED])
def test_the_last_report_of_a_collector_is_the_reason_of_the_failure(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, code: ExitCode
) -> None:
    """Rank 0 was busy between the configuration and the first request."""
    peer.send(Problem("environment.name=mine:Nothing", code))
    peer.close(linger_seconds=5)
    with pytest.raises(CollectorFailed, match=r"node 0 failed: .*mine:Nothing") as error:
        submit_until_it_is_gone(queue)
    assert error.value.exit_code is code


def submit_until_it_is_gone(queue: RolloutQueue) -> None:
    for n in range(1000):
        queue.submit([request(f"group-{n}")])
        time.sleep(0.01)


def collector_configuration(path: str = "/model") -> Configure:
    return Configure(
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
    hub.wait_for(len(hub.nodes) + 1, 5)
    return peer


def test_an_observer_learns_of_engines_and_collectors_that_failed(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    observer = Observer()
    queue.on_engine_failure = observer.handle_engine_failure
    queue.on_lost_collector = observer.handle_lost_collector
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
    other.send(msgspec.structs.replace(group_done("a"), attempt=1))
    for name in "bc":
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
                replacement.send(msgspec.structs.replace(group_done(name), attempt=1))

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
    answer = group_done("a", environment_error="new")
    replacement.send(msgspec.structs.replace(answer, attempt=1))
    (group,) = queue.as_completed(idle)
    assert group.environment_error == "new"
    assert queue.tokens_of("a") == 5
    replacement.close()


def test_results_that_arrived_before_the_loss_are_delivered(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a"), request("b")])
    peer.send(group_done("a"))
    other = Peer(hub, 1)
    time.sleep(0.2)
    hub.wait_for(2, 5)  # receives both
    hub.disconnect(1, 0, "ended: killed by signal 9")
    replacement = replace_collector(hub, 0)
    replacement.send(msgspec.structs.replace(group_done("b"), attempt=1))
    assert [group.group_id for group in queue.as_completed(idle)] == ["a", "b"]
    assert requested_ids(replacement, 1) == ["b"]
    assert queue.lost_groups(["a", "b"]) == ["a"]
    replacement.close()
    other.close()


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
    queue.drop(["a", "b"])
    assert other.receive(1) == [Drop(("a", "b"))]
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
    assert messages == [request("a"), Drop(("a",)), request("a")]


def test_a_release_does_not_go_to_the_replacement_of_a_collector(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    peer.send(group_done("a"))
    list(queue.as_completed(idle))
    replacement = replace_collector(hub, 0)
    queue.submit([])
    queue.drop(["a"])
    assert replacement.receive() == []
    queue.submit([request("a")])
    assert requested_ids(replacement, 1) == ["a"]
    replacement.close()


def test_loads_stay_right_when_collectors_are_lost(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    """Node 1 has the requests of both nodes when the collector of node 0 is replaced."""
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("a", 5), request("b", 3)])
    hub.disconnect(0, 0, "ended: killed by signal 9")
    queue.submit([])
    replacement = replace_collector(hub, 0)
    queue.submit([request("c", 6), request("d", 1), request("e", 2), request("f", 1)])
    assert requested_ids(replacement, 3) == ["c", "d", "e"]  # 6, 7 and 9 rollouts beside 8
    assert requested_ids(other, 3) == ["b", "a", "f"]
    other.send(group_done("b"))
    for name in "af":
        other.send(msgspec.structs.replace(group_done(name), attempt=1))
    for name in "cde":
        replacement.send(msgspec.structs.replace(group_done(name), attempt=1))
    assert len(list(queue.as_completed(idle))) == 6
    queue.submit([request("g", 1), request("h", 2), request("i", 1)])
    assert requested_ids(replacement, 2) == ["g", "i"]
    assert requested_ids(other, 1) == ["h"]
    other.close()
    replacement.close()


def test_a_replacement_gets_the_configuration_and_the_latest_state(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    configurations = {node: collector_configuration(f"/{node}") for node in (0, 1)}
    queue.configure(configurations)
    engines = tuple(Engine(url=f"http://{n}", node=node) for n, node in enumerate((0, 0, 1)))
    queue.set_engines(engines)
    queue.set_engines(engines[1:])
    queue.set_version(4)
    states = [
        Serve(number=1, engines=engines),
        Serve(number=2, engines=engines[1:]),
        Serve(number=3, engines=engines[1:], version=4),
    ]
    assert peer.receive(4) == [configurations[0], *states]
    assert other.receive(4) == [configurations[1], *states]
    replacement = replace_collector(hub, 0)
    queue.submit([])
    assert replacement.receive(2) == [configurations[0], states[-1]]
    replacement.close()
    other.close()


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
    queue.set_engines([Engine(url="http://e", node=1)])
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
        elif Serve(number=1, is_paused=True) in replacements[0].receive():
            replacements[0].send(Served(3, 1))

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
        if isinstance(message, Drop) and message.is_reported:
            (name,) = message.group_ids
            attempt = next(r.attempt for r in self.requests[::-1] if r.group_id == name)
            answer = Dropped(group_id=name, generated_tokens=1, attempt=attempt)
            self.inbox.append((node, answer))

    def send_to_each(self, nodes: list[int], message: ToCollector) -> None:
        for node in nodes:
            self.send(node, message)

    def answer_all(self) -> None:
        self.inbox += [(0, group_done(r.group_id)) for r in self.requests]
        self.requests.clear()

    def poll(self, timeout_seconds: float) -> tuple[int, Event] | None:
        return self.inbox.pop() if self.inbox else None


@pytest.mark.slow
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
    hub.answer_all()  # groups of step 2 come first
    arrivals = set()
    for group in queue.as_completed(idle, is_wanted=is_wanted):
        arrivals.add(group.group_id)
        queue.submit([])  # as the sampler does
    assert arrivals == names
    assert num_questions.total() <= 4 * 4096
    assert len(list(queue.as_completed(idle))) == 4096


def test_a_request_with_the_id_of_an_aborted_one_is_another_one() -> None:
    hub = AnsweringHub()
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4))  # type: ignore[arg-type]
    queue.submit([request("step-0-0")])
    assert queue.abort(["step-0-0"], idle) == (1, 0)
    queue.submit([request("step-0-0")])
    first, again = (r for r in hub.requests if r.group_id == "step-0-0")
    assert again.attempt > first.attempt
