import queue as queue_module
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from launch.testbed.rollout_refs import make_ref
from megatron_rl.config.schema import (
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.rollouts.hub import CollectorHub, CollectorLost
from megatron_rl.rollouts.messages import (
    AbortRequest,
    Alive,
    Configure,
    EngineBack,
    EngineLeftOut,
    Failed,
    GroupRequest,
    Release,
    Stop,
)
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from sglang_bridge.errors import RequestFailed
from tests.support.collectors import Peer, done, request
from tests.support.rollouts import VERSION, make_rollout


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer) -> Iterator[RolloutQueue]:
    yield RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=1))


def idle() -> None:
    pass


def asked(peer: Peer, count: int) -> list[str]:
    return [message.group_id for message in peer.hear(count) if isinstance(message, GroupRequest)]


def test_each_group_is_delivered_once_and_can_be_released(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a"), request("b")])
    assert asked(peer, 2) == ["a", "b"]
    peer.say(done("b"))
    peer.say(done("a"))
    assert [g.group_id for g in queue.as_completed(idle)] == ["b", "a"]
    with pytest.raises(ValueError, match="once"):
        queue.submit([request("a")])
    queue.release(["a", "b"])
    assert peer.hear(1) == [Release(("a", "b"))]
    assert queue.generated_tokens == 10


def test_an_evaluated_group_has_nothing_to_release(queue: RolloutQueue, peer: Peer) -> None:
    for _ in range(2):
        queue.submit([request("a", evaluation=True)])
        peer.say(done("a"))
        assert len(list(queue.as_completed(idle))) == 1
    queue.release(["a"])
    assert not any(isinstance(message, Release) for message in peer.hear(2))


def test_work_is_spread_by_outstanding_samples(hub: CollectorHub, queue: RolloutQueue, peer: Peer) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.submit([request("big", 5), request("x"), request("y"), request("z")])
    assert [asked(peer, 1), asked(other, 3)] == [["big"], ["x", "y", "z"]]
    other.hang_up()


def test_what_is_still_outstanding_counts_where_more_is_asked_for(
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
    assert [asked(peer, 5), asked(other, 4)] == [["a", "c", "d", "f", "i"], ["b", "e", "g", "h"]]
    other.hang_up()


def test_rollouts_of_the_start_checkpoint_are_fresh_before_the_first_sync(
    hub: CollectorHub, peer: Peer
) -> None:
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=0))
    queue.submit([request("a")])
    peer.say(done("a", (msgspec.structs.replace(make_ref(make_rollout(3, 4)), versions=(0,)),)))
    (group,) = queue.as_completed(idle)
    assert len(group.rollouts) == 1


def test_idle_is_called_while_waiting(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a")])
    calls = []

    def answer_on_third_call() -> None:
        calls.append(1)
        if len(calls) == 3:
            peer.say(done("a"))

    assert len(list(queue.as_completed(answer_on_third_call, idle_every_seconds=0.01))) == 1
    assert len(calls) >= 3


def test_idle_is_not_called_for_each_message(queue: RolloutQueue, peer: Peer) -> None:
    """It is a collective of all ranks, and a frozen engine's requests expire by the hundred."""
    queue.submit([request("a", evaluation=True)])
    for rid in range(100):
        peer.say(AbortRequest("http://e", str(rid)))
    peer.say(done("a"))
    calls: list[int] = []
    assert len(list(queue.as_completed(lambda: calls.append(1)))) == 1
    assert len(calls) < 5


def test_idle_is_not_called_for_each_sign_of_life(queue: RolloutQueue, peer: Peer) -> None:
    """Of a hundred nodes a hundred come every second."""
    queue.submit([request("a", evaluation=True)])
    calls: list[int] = []

    def live() -> None:
        for _ in range(60):
            peer.say(Alive())
            time.sleep(0.005)
        peer.say(done("a"))

    speaker = threading.Thread(target=live)
    speaker.start()
    assert len(list(queue.as_completed(lambda: calls.append(1), idle_every_seconds=0.1))) == 1
    speaker.join()
    assert 2 <= len(calls) < 30


# the queue's version | max_staleness | evaluation | what becomes of a rollout of version 5
DATED = [
    (VERSION, 0, False, None),
    (VERSION + 1, 1, False, None),
    (VERSION + 2, 1, False, "stale"),
    (VERSION - 1, 1, False, "version_never_sent"),
    (0, 9, False, "version_never_sent"),
    (VERSION, 1, True, None),
    (
        VERSION + 1,
        1,
        True,
        "stale",
    ),  # it would count as the accuracy of weights that it was not drawn with
    (VERSION - 1, 1, True, "version_never_sent"),
]


@pytest.mark.parametrize(("version", "staleness", "evaluation", "reason"), DATED)
def test_rollouts_of_weights_too_old_or_never_sent_are_counted_not_delivered(
    hub: CollectorHub, peer: Peer, version: int, staleness: int, evaluation: bool, reason: str | None
) -> None:
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=staleness))
    queue.set_version(version)
    queue.submit([request("a", evaluation=evaluation)])
    peer.say(done("a", (msgspec.structs.replace(make_ref(make_rollout(3, 4)), num_generated=4),)))
    (group,) = queue.as_completed(idle)
    assert len(group.rollouts) == (0 if reason else 1)
    assert (group.rejections, group.rejected_tokens) == (
        ({reason: 1}, {reason: 4}) if reason else ({}, {})
    )


def test_one_token_of_a_version_that_was_never_sent_is_enough(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.set_version(VERSION)
    queue.submit([request("a")])
    kept = make_ref(make_rollout(3, 4))
    ref = msgspec.structs.replace(kept, versions=(VERSION, 999))
    unsampled = msgspec.structs.replace(kept, versions=())
    peer.say(done("a", (ref, kept, unsampled)))
    (group,) = queue.as_completed(idle)
    assert group.rollouts == (kept, unsampled)
    assert group.rejections == {"version_never_sent": 1}


def test_what_happens_to_engines_is_said_and_known(hub: CollectorHub, peer: Peer) -> None:
    said: list[str] = []
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=said.append)
    for message, left_out in (
        (EngineLeftOut("http://e", "500: broken"), {"http://e"}),
        (EngineBack("http://e"), set()),
    ):
        queue.submit([request("a", evaluation=True)])
        peer.say(message)
        peer.say(done("a"))
        assert len(list(queue.as_completed(idle))) == 1
        assert queue.engines_left_out == left_out
    assert said == [
        "engine http://e is left out until it is healthy again: 500: broken",
        "engine http://e is used again",
    ]


def test_an_expired_request_is_aborted_and_nobody_waits_for_that(hub: CollectorHub, peer: Peer) -> None:
    """The engine may be stopped: asking it takes as long as a connection waits."""
    told, hang = queue_module.Queue[tuple[str, str]](), threading.Event()

    def abort(url: str, rid: str) -> None:
        assert threading.current_thread().daemon, "the process would not end before it"
        told.put((url, rid))
        hang.wait(30)
        raise RequestFailed("no answer")

    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), abort=abort)
    queue.submit([request("a")])
    for rid in ("a/0#1;", "a/1#2;"):
        peer.say(AbortRequest("http://e", rid))
    peer.say(done("a"))
    assert len(list(queue.as_completed(idle))) == 1
    assert {told.get(timeout=5), told.get(timeout=5)} == {
        ("http://e", "a/0#1;"),
        ("http://e", "a/1#2;"),
    }
    hang.set()


def test_an_expired_request_is_given_up_where_nobody_can_abort_it(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    peer.say(AbortRequest("http://e", "a/0#1;"))
    peer.say(done("a"))
    assert len(list(queue.as_completed(idle))) == 1


def test_failures_are_named(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a")])
    for message, words in (
        (Failed("the engine has gone"), "the engine has gone"),
        (done("b"), "unexpected GroupDone"),
    ):
        peer.say(message)
        with pytest.raises(CollectorFailed, match=words) as caught:
            list(queue.as_completed(idle))
        assert (
            isinstance(caught.value, Failure) and caught.value.exit_code is ExitCode.ENGINE_FAILED
        )


@pytest.mark.parametrize("refused", [True, False])
def test_what_a_collector_said_before_it_left_is_told_although_nobody_had_listened(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, refused: bool
) -> None:
    """Rank 0 was busy between the configuration and the first request."""
    peer.say(Failed("environment.name=mine:Nothing", is_refusal=refused))
    peer.hang_up(linger_seconds=5)
    code = ExitCode.REFUSED if refused else ExitCode.ENGINE_FAILED
    with pytest.raises(CollectorFailed, match=r"node 0 failed: .*mine:Nothing") as caught:
        submit_until_it_is_gone(queue)
    assert caught.value.exit_code is code


def test_a_collector_that_left_without_a_word_is_lost(queue: RolloutQueue, peer: Peer) -> None:
    peer.say(done("b"))
    peer.hang_up(linger_seconds=5)
    with pytest.raises(CollectorLost, match="node 0 is gone"):
        submit_until_it_is_gone(queue)


def submit_until_it_is_gone(queue: RolloutQueue) -> None:
    for n in range(1000):
        queue.submit([request(f"group-{n}")])
        time.sleep(0.01)


def test_every_collector_gets_its_own_configuration_and_is_told_to_end(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    ours, theirs = (
        Configure(
            engines=(),
            api_key=None,
            model_path=path,
            routes=None,
            engine=EngineSettings(),
            rollout=RolloutSettings(max_new_tokens=4),
            reward=RewardSettings(),
            environment=EnvironmentSettings(),
        )
        for path in ("/ours", "/theirs")
    )
    queue.configure({0: ours, 1: theirs})
    queue.stop()
    assert [peer.hear(2), other.hear(2)] == [[ours, Stop()], [theirs, Stop()]]
    other.hang_up()


def test_stale_rollouts_add_to_what_the_collector_rejected_as_such(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.set_version(9)
    queue.submit([request("a")])
    peer.say(done("a", (make_ref(make_rollout(3, 4)),), rejections={"stale": 2, "engine": 1}))
    (group,) = queue.as_completed(idle)
    assert group.rejections == {"stale": 3, "engine": 1}
