"""The queue's hold: collectors stop, and say how much they have sampled."""

import re
import threading
import time

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.rollouts.queue import HoldTimedOut, RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import Drop, GroupRequest, Serve, Served
from tests.support.collectors import Peer, group_done, request


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer) -> RolloutQueue:
    return RolloutQueue(hub, RolloutSettings(max_new_tokens=4))


def abort() -> None:
    """Abort nothing: there is no engine."""


def answer_later(peer: Peer, message: Served, seconds: float = 0.2) -> None:
    threading.Timer(seconds, lambda: peer.send(message)).start()


def test_a_hold_counts_the_tokens_since_the_last_one(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    aborts: list[float] = []
    for number, tokens in ((1, (30, 4)), (3, (37, 4))):
        answer_later(peer, Served(tokens[0], number))
        answer_later(other, Served(tokens[1], number))
        num_tokens = queue.hold(abort=lambda: aborts.append(time.monotonic()), timeout_seconds=10)
        assert num_tokens == (34 if number == 1 else 7)
        assert aborts
        queue.proceed()
    for collector in (peer, other):
        assert collector.receive(4) == [
            Serve(number=number, is_paused=number % 2 == 1) for number in (1, 2, 3, 4)
        ]
    other.close()


def test_groups_that_end_during_a_hold_are_delivered_after_it(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a"), request("b")])
    peer.send(group_done("a"))
    answer_later(peer, Served(0, 1))
    queue.hold(abort=abort, timeout_seconds=10)
    queue.proceed()
    peer.send(group_done("b"))
    groups = queue.as_completed(lambda: None)
    assert sorted(group.group_id for group in groups) == ["a", "b"]
    messages = [m for m in peer.receive(4) if not isinstance(m, GroupRequest)]
    assert messages == [Serve(number=1, is_paused=True), Serve(number=2)]


def test_a_hold_does_not_wait_for_a_collector_that_is_gone(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    answer_later(peer, Served(2, 1))
    threading.Timer(0.3, lambda: other.send_raw(b"junk")).start()
    assert queue.hold(abort=abort, timeout_seconds=10) == 2
    other.close()


def test_a_hold_has_a_deadline_and_names_the_nodes(queue: RolloutQueue, peer: Peer) -> None:
    with pytest.raises(HoldTimedOut, match=r"node\(s\) \[0\] .* \d\.\d s") as error:
        queue.hold(abort=abort, timeout_seconds=0.3)
    (seconds,) = re.findall(r"(\d+\.\d) s after these were to stop", str(error.value))
    assert 0.3 <= float(seconds) < 10
    assert error.value.exit_code is ExitCode.ENGINE_FAILED


def test_a_late_answer_to_a_hold_that_timed_out_is_none_to_the_next_one(
    queue: RolloutQueue, peer: Peer
) -> None:
    """Its engines came to rest between both, and work on requests again."""
    with pytest.raises(HoldTimedOut):
        queue.hold(abort=abort, timeout_seconds=0.2)
    queue.proceed()
    answer_later(peer, Served(9, 1))
    answer_later(peer, Served(2, 3), 0.5)
    assert queue.hold(abort=abort, timeout_seconds=10) == 2


def test_withdrawn_requests_can_be_made_again(queue: RolloutQueue, peer: Peer) -> None:
    """A late answer to the first request is not an answer to the second one."""
    queue.submit([request("a"), request("b")])
    peer.send(group_done("b"))
    queue.drop(["a", "b"])
    peer.send(group_done("a"))
    queue.submit([request("a")])
    messages = peer.receive(5)
    last = messages[-1]
    assert isinstance(last, GroupRequest) and (last.group_id, last.attempt) == ("a", 1)
    assert any(isinstance(message, Drop) for message in messages)
    peer.send(msgspec.structs.replace(group_done("a"), attempt=1, generated_tokens=3))
    groups = list(queue.as_completed(lambda: None))
    assert [group.group_id for group in groups] == ["a"]
    assert queue.tokens_of("a") == 3
