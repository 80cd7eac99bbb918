"""The queue's hold: collectors stop, and say what they keep."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.messages import (
    GroupRequest,
    Held,
    Hold,
    LiftBudgets,
    Proceed,
    Settle,
    VersionBudget,
    Withdraw,
)
from megatron_rl.rollouts.queue import HeldRequests, HoldTimedOut, RolloutQueue
from tests.support.collectors import Peer, group_done, request


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer) -> RolloutQueue:
    return RolloutQueue(hub, RolloutSettings(max_new_tokens=4))


def answer_later(peer: Peer, message: Held, seconds: float = 0.2) -> None:
    threading.Timer(seconds, lambda: peer.send(message)).start()


def test_a_hold_counts_the_partial_responses_of_all_nodes(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    aborts: list[float] = []
    answer_later(peer, Held(2, 30, number=1))
    answer_later(other, Held(1, 4, number=1))
    held_requests = queue.hold(abort=lambda: aborts.append(time.monotonic()), timeout_seconds=10)
    assert held_requests == HeldRequests(num_partials=3, num_tokens=34)
    assert aborts
    queue.proceed()
    for collector in (peer, other):
        assert collector.receive(2) == [Hold(True, 1), Proceed()]
    other.close()


def test_groups_that_end_during_a_hold_are_delivered_after_it(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a"), request("b")])
    peer.send(group_done("a"))
    answer_later(peer, Held(0, 0, number=1))
    queue.hold(abort=None, timeout_seconds=10)
    queue.proceed()
    peer.send(group_done("b"))
    groups = queue.as_completed(lambda: None)
    assert sorted(group.group_id for group in groups) == ["a", "b"]
    messages = [m for m in peer.receive(4) if not isinstance(m, GroupRequest)]
    assert messages == [Hold(False, 1), Proceed()]


def test_a_hold_does_not_wait_for_a_collector_that_is_gone(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    answer_later(peer, Held(1, 2, number=1))
    threading.Timer(0.3, lambda: other.send_raw(b"junk")).start()
    assert queue.hold(abort=None, timeout_seconds=10) == HeldRequests(1, 2)
    other.close()


def test_a_hold_has_a_deadline_and_names_the_nodes(queue: RolloutQueue, peer: Peer) -> None:
    with pytest.raises(HoldTimedOut, match=r"node\(s\) \[0\] .* \d\.\d s") as error:
        queue.hold(abort=None, timeout_seconds=0.3)
    (seconds,) = re.findall(r"(\d+\.\d) s after these were to stop", str(error.value))
    assert 0.3 <= float(seconds) < 10
    assert error.value.exit_code is ExitCode.ENGINE_FAILED


def test_a_late_answer_to_a_hold_that_timed_out_is_none_to_the_next_one(
    queue: RolloutQueue, peer: Peer
) -> None:
    """Its engines came to rest between both, and work on requests again."""
    with pytest.raises(HoldTimedOut):
        queue.hold(abort=None, timeout_seconds=0.2)
    queue.proceed()
    answer_later(peer, Held(9, 9, number=1))
    answer_later(peer, Held(1, 2, number=2), 0.5)
    assert queue.hold(abort=None, timeout_seconds=10) == HeldRequests(1, 2)


def test_a_node_that_gets_a_request_has_to_settle_again(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    """Its earlier answer did not know of the request, which another collector had."""
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("a"), request("b")])
    has_answered = threading.Event()

    def answer() -> None:
        (first,) = [m for m in peer.receive(2) if isinstance(m, Settle)]
        peer.send(Held(0, 0, 0, first.number))
        has_answered.set()
        (moved_request, second) = peer.receive(2)
        assert isinstance(moved_request, GroupRequest) and isinstance(second, Settle)
        peer.send(Held(9, 9, 9, first.number))  # late
        peer.send(Held(1, 5, 7, second.number))

    def end_other() -> None:
        if has_answered.is_set():
            queue.disconnect_before(1, 1, "ended")

    thread = threading.Thread(target=answer)
    thread.start()
    held_requests = queue.settle(can_continue=lambda: True, idle=end_other)
    assert held_requests == HeldRequests(num_partials=1, num_tokens=5, num_new_tokens=7)
    thread.join()
    other.close()


def test_a_settle_ends_when_nothing_can_sample(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a")])
    assert queue.settle(can_continue=lambda: False) == HeldRequests(0, 0, 0)


def test_withdrawn_requests_can_be_made_again(queue: RolloutQueue, peer: Peer) -> None:
    """A late answer to the first request is not an answer to the second one."""
    queue.submit([request("a"), request("b")])
    peer.send(group_done("b"))
    queue.withdraw(["a", "b"])
    peer.send(group_done("a"))
    queue.submit([request("a")])
    messages = peer.receive(5)
    last = messages[-1]
    assert isinstance(last, GroupRequest) and (last.group_id, last.attempt) == ("a", 1)
    assert any(isinstance(message, Withdraw) for message in messages)
    peer.send(msgspec.structs.replace(group_done("a"), attempt=1, generated_tokens=3))
    groups = list(queue.as_completed(lambda: None))
    assert [group.group_id for group in groups] == ["a"]
    assert queue.tokens_of("a") == 3


def test_a_settle_waits_for_a_collector_that_replaces_a_lost_one(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    """Its requests would be sampled with other weights otherwise."""
    queue.submit([request("a")])
    peer.receive(1)
    queue.disconnect_before(0, 1, "ended")
    queue.lost_groups([])  # handles events
    assert queue.connected_nodes == []

    def replace_collector() -> Peer:
        time.sleep(0.3)
        later = Peer(hub, 0, epoch=1)
        settles: list[Settle] = []
        while not settles:
            settles = [m for m in later.receive() if isinstance(m, Settle)][-1:]
        later.send(Held(1, 5, 7, settles[0].number))
        return later

    with ThreadPoolExecutor() as threads:
        future = threads.submit(replace_collector)
        held_requests = queue.settle(can_continue=lambda: True)
    assert held_requests == HeldRequests(num_partials=1, num_tokens=5, num_new_tokens=7)
    future.result().close()


def test_a_settle_that_waits_for_a_collector_ends_when_nothing_can_sample(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    queue.disconnect_before(0, 1, "ended")
    answers = iter([True, True, False])
    held_requests = queue.settle(can_continue=lambda: next(answers))
    assert held_requests == HeldRequests(0, 0, 0)
    assert next(answers, None) is None


def test_lifted_budgets_are_gone_for_groups_that_are_requested_again(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([msgspec.structs.replace(request("a"), budget=VersionBudget(2, 3))])
    peer.receive(1)
    peer.send(group_done("a"))
    assert [group.group_id for group in queue.as_completed(lambda: None)] == ["a"]
    queue.lift_budgets()
    queue.request_again(["a"])
    messages = peer.receive(3)
    assert [m.budget for m in messages if isinstance(m, GroupRequest)] == [None]


def test_lifted_budgets_are_gone_for_collectors_that_come_later(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([msgspec.structs.replace(request("a"), budget=VersionBudget(2, 3))])
    queue.lift_budgets()
    messages = peer.receive(2)
    assert isinstance(messages[-1], LiftBudgets)
    peer.close()
    later = Peer(hub, 0, epoch=1)
    requests: list[GroupRequest] = []
    deadline = time.monotonic() + 10
    while not requests and time.monotonic() < deadline:
        queue.lost_groups([])  # handles events
        requests += [m for m in later.receive() if isinstance(m, GroupRequest)]
    assert [request.budget for request in requests] == [None]
    later.close()
