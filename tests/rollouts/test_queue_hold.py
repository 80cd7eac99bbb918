"""The queue's hold: collectors stop, and say what they keep."""

import threading
import time

import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.messages import GroupRequest, Held, Hold, Proceed
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
    answer_later(peer, Held(2, 30))
    answer_later(other, Held(1, 4))
    held_requests = queue.hold(abort=lambda: aborts.append(time.monotonic()), timeout_seconds=10)
    assert held_requests == HeldRequests(num_partials=3, num_tokens=34)
    assert aborts
    queue.proceed()
    for collector in (peer, other):
        assert collector.receive(2) == [Hold(keep_partials=True), Proceed()]
    other.close()


def test_groups_that_end_during_a_hold_are_delivered_after_it(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a"), request("b")])
    peer.send(group_done("a"))
    answer_later(peer, Held(0, 0))
    queue.hold(abort=None, timeout_seconds=10)
    queue.proceed()
    peer.send(group_done("b"))
    groups = queue.as_completed(lambda: None)
    assert sorted(group.group_id for group in groups) == ["a", "b"]
    messages = [m for m in peer.receive(4) if not isinstance(m, GroupRequest)]
    assert messages == [Hold(keep_partials=False), Proceed()]


def test_a_hold_does_not_wait_for_a_collector_that_is_gone(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    answer_later(peer, Held(1, 2))
    threading.Timer(0.3, lambda: other.send_raw(b"junk")).start()
    assert queue.hold(abort=None, timeout_seconds=10) == HeldRequests(1, 2)
    other.close()


def test_a_hold_has_a_deadline_and_names_the_nodes(queue: RolloutQueue, peer: Peer) -> None:
    with pytest.raises(HoldTimedOut, match=r"node\(s\) \[0\] .* 0\.3 s") as error:
        queue.hold(abort=None, timeout_seconds=0.3)
    assert error.value.exit_code is ExitCode.ENGINE_FAILED
