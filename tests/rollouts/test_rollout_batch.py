"""Rollout batches and evaluations, with a simulated collector."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import EvalSettings, RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, RolloutLocation, Verdict
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult
from megatron_rl.rollouts.evaluation.evaluation import Evaluation
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.steps.rollout_batch import (
    NonFiniteResponses,
    RolloutBatch,
    TooManyRejected,
)
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.steps.step_sampling import merge_groups
from megatron_rl.rollouts.wire.messages import EngineLeftOut, GroupDone, GroupRequest
from megatron_rl.rollouts.wire.rejections import UserClassFailed
from tests.support.collectors import Peer, group_done
from tests.support.failures import fails
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import VERSION, make_rollout
from tests.support.selectors import FixedPrompts

PROMPTS = [Prompt(id=name, token_ids=(1, 2), answer="3", task="t") for name in "abc"]
SETTINGS = RolloutSettings(max_new_tokens=8, samples_per_prompt=2, temperature=0.7)


def synced_queue(hub: CollectorHub, settings: RolloutSettings = SETTINGS) -> RolloutQueue:
    """A queue whose engines have the weights that sampled the responses of `make_rollout`."""
    queue = RolloutQueue(hub, settings)
    as_completed = partial(queue.as_completed, idle_every_seconds=0.02)
    queue.as_completed = as_completed  # type: ignore[method-assign]
    queue.set_version(VERSION)
    return queue


def answer_requests(
    peer: Peer, answer: Callable[[GroupRequest], GroupDone], requests: list[GroupRequest]
) -> Callable[[], None]:
    """Make an `idle` in which the collector answers its requests, the last one first."""

    def idle() -> None:
        new_requests = [
            m for m in peer.receive(first_milliseconds=20) if isinstance(m, GroupRequest)
        ]
        requests.extend(new_requests)
        for request in reversed(new_requests):
            peer.send(answer(request))

    return idle


def answer_with_one_rejection(request: GroupRequest) -> GroupDone:
    """Answer with a correct and an incorrect rollout. The second one of prompt 1 is rejected."""
    correct = make_ref(make_rollout(2, 3))
    incorrect = make_ref(make_rollout(2, 5), reward=0.0)
    refs = (correct,) if request.group_id == "step-4-1" else (correct, incorrect)
    rejections = {"engine": 1} if len(refs) == 1 else {}
    return group_done(
        request.group_id, refs, rejections=rejections, generated_at=2.0, scored_at=2.5
    )


def test_groups_come_in_the_order_of_their_prompts(hub: CollectorHub, peer: Peer) -> None:
    requests: list[GroupRequest] = []
    idle = answer_requests(peer, answer_with_one_rejection, requests)
    sampler = RolloutSampler(synced_queue(hub), SETTINGS, FixedPrompts(PROMPTS, 2), (1,), idle)
    batch = sampler.sample(4)
    ids = ["step-4-0", "step-4-1", "step-4-2"]
    assert list(batch.delivered_ids) == ids
    assert [group.group_id for group in batch.groups] == ids
    assert [request.group_id for request in requests] == ids
    assert [request.prompt for request in requests] == PROMPTS
    assert all(request.num_samples == 2 and not request.evaluation for request in requests)
    assert requests[0].sampling == Sampling(max_new_tokens=8, temperature=0.7, stop_token_ids=(1,))


def test_metrics_of_a_batch(hub: CollectorHub, peer: Peer) -> None:
    idle = answer_requests(peer, answer_with_one_rejection, [])
    sampler = RolloutSampler(synced_queue(hub), SETTINGS, FixedPrompts(PROMPTS, 2), (1,), idle)
    assert sampler.sample(4).metrics() == {
        "rollout/tokens": 15.0,
        "rollout/samples": 5.0,
        "rollout/rejected": 1.0,
        "rollout/rejected/engine": 1.0,
        "rollout/response_length": pytest.approx((3 * 3 + 2 * 5) / 5),
        "rollout/truncated": 0.0,
        "rollout/engines_left_out": 0.0,
        "rollout/repeated": 0.0,
        "reward/mean": pytest.approx(0.6),
        "reward/no_verdict": 0.0,
        "time/reward_exposed": 0.5,
    }
    assert sampler.sample(5).generated_tokens == 15  # of this batch alone


def test_truncated_responses_are_a_share() -> None:
    ref = make_ref(make_rollout(2, 3))
    cut = msgspec.structs.replace(ref, finish_reason=FinishReason.LENGTH)
    assert (
        RolloutBatch((group_done("a", (ref, cut, cut, cut)).group,), 1).metrics()[
            "rollout/truncated"
        ]
        == 0.75
    )


def test_responses_that_repeat_themselves_are_a_share() -> None:
    ref = make_ref(make_rollout(2, 3))
    repetitive = msgspec.structs.replace(ref, finish_reason=FinishReason.LENGTH, is_repetitive=True)
    metrics = RolloutBatch((group_done("a", (ref, ref, ref, repetitive)).group,), 1).metrics()
    assert metrics["rollout/stopped_repetition"] == metrics["rollout/truncated"] == 0.25
    others = RolloutBatch((group_done("a", (ref, ref)).group,), 1).metrics()
    assert "rollout/stopped_repetition" not in others


def sample_batch(
    hub: CollectorHub, peer: Peer, answer: Callable[[GroupRequest], GroupDone]
) -> RolloutBatch:
    prompts = FixedPrompts(PROMPTS, 2)
    return RolloutSampler(
        synced_queue(hub), SETTINGS, prompts, (1,), answer_requests(peer, answer, [])
    ).sample(4)


def answer_with_losses(count: int, reason: str = "engine") -> Callable[[GroupRequest], GroupDone]:
    """Make an answer in which `count` of the rollouts are rejected, of the first groups first."""
    refs = (make_ref(make_rollout(2, 3)),) * 2

    def answer(request: GroupRequest) -> GroupDone:
        place = int(request.group_id.rpartition("-")[2])
        num_lost = min(max(count - 2 * place, 0), 2)
        return group_done(
            request.group_id, refs[num_lost:], rejections={reason: num_lost} if num_lost else {}
        )

    return answer


def test_a_batch_may_lose_half_of_its_rollouts(hub: CollectorHub, peer: Peer) -> None:
    batch = sample_batch(hub, peer, answer_with_losses(3))
    assert batch.rejections == {"engine": 3}  # of 6


def test_a_batch_with_too_many_losses_ends_the_run(hub: CollectorHub, peer: Peer) -> None:
    with pytest.raises(TooManyRejected) as error:
        sample_batch(hub, peer, answer_with_losses(4))
    message = str(error.value)
    assert message.startswith("batch step-4: 4 of 6") and "4 engine" in message
    assert "0.5 is the largest share" in message and "logs/collector-*.log" in message
    assert isinstance(error.value, Failure) and error.value.exit_code is ExitCode.ENGINE_FAILED
    assert not isinstance(error.value, NonFiniteResponses)


def test_a_batch_without_usable_rollouts_ends_the_run_at_any_limit(
    hub: CollectorHub, peer: Peer
) -> None:
    """NaN has an error of its own, so that a guard can react to it."""
    message = r"6 of 6 rollouts cannot be used \(6 logprobs_nonfinite \(.* NaN"
    with pytest.raises(NonFiniteResponses, match=message) as error:
        sample_batch(
            hub,
            peer,
            lambda request: group_done(request.group_id, rejections={"logprobs_nonfinite": 2}),
        )
    assert isinstance(error.value, TooManyRejected)


def test_engines_that_are_left_out_are_a_metric(hub: CollectorHub, peer: Peer) -> None:
    def answer(request: GroupRequest) -> GroupDone:
        peer.send(EngineLeftOut("http://e", "500"))
        return group_done(request.group_id, (make_ref(make_rollout(2, 3)),) * 2)

    assert sample_batch(hub, peer, answer).metrics()["rollout/engines_left_out"] == 1.0


def test_rollouts_without_a_verdict_are_unusable(hub: CollectorHub, peer: Peer) -> None:
    none = Verdict(reward=None, correctness=None, reason="timeout")
    without_verdict = msgspec.structs.replace(make_ref(make_rollout(2, 3)), verdict=none)
    with pytest.raises(
        UserClassFailed, match=r"6 of 6 .* \(6 no_verdict \(the scorer failed, .*reward\.timeout_s"
    ):
        sample_batch(
            hub,
            peer,
            lambda request: group_done(request.group_id, (without_verdict, without_verdict)),
        )


def test_scoring_is_timed_by_the_clock_of_each_node(hub: CollectorHub, peer: Peer) -> None:
    """Monotonic clocks start with the machine, so the clocks of two nodes differ by weeks."""

    def group_on(node: int, generated_at: float, scored_at: float) -> Group:
        where = RolloutLocation(node=node, pid=1, fd=1, offset=0, nbytes=0)
        ref = make_ref(make_rollout(2, 3), where)
        return group_done("a", (ref,), generated_at=generated_at, scored_at=scored_at).group

    empty = msgspec.structs.replace(group_on(1, 9e9, 9e9), rollouts=())
    groups = (group_on(0, 10.0, 10.5), group_on(0, 10.2, 11.0), group_on(1, 5e6, 5e6 + 0.25), empty)
    assert RolloutBatch(groups, 1).reward_exposed == pytest.approx(0.8)
    assert RolloutBatch((empty,), 1).reward_exposed == 0.0
    split = msgspec.structs.replace(
        group_on(0, 10.0, 5e6), rollouts=groups[0].rollouts + groups[2].rollouts
    )
    assert RolloutBatch((*groups, split), 1).reward_exposed == pytest.approx(0.8)


def test_an_evaluation_samples_as_training_does_by_default(hub: CollectorHub, peer: Peer) -> None:
    requests: list[GroupRequest] = []
    idle = answer_requests(
        peer, lambda r: group_done(r.group_id, (make_ref(make_rollout(2, 3)),)), requests
    )
    queue = synced_queue(hub)
    for temperature in (None, 0.0):
        settings = EvalSettings(samples_per_prompt=1, temperature=temperature)
        accuracy = Evaluation(queue, PROMPTS, settings, SETTINGS, (1,), idle).measure("4")
        assert (accuracy.accuracy, accuracy.questions) == (1.0, 3)
    assert [r.group_id for r in requests[:3]] == ["eval-4-0", "eval-4-1", "eval-4-2"]
    assert all(r.evaluation for r in requests)
    assert {(r.sampling.max_new_tokens, r.sampling.stop_token_ids) for r in requests} == {(8, (1,))}
    assert [r.sampling.temperature for r in requests] == [0.7] * 3 + [0.0] * 3


@pytest.mark.parametrize(("samples", "is_error"), [(10, False), (9, True)])
def test_an_evaluation_may_lose_a_tenth_of_its_responses(
    hub: CollectorHub, peer: Peer, samples: int, is_error: bool
) -> None:
    queue = synced_queue(hub)
    settings = EvalSettings(samples_per_prompt=samples)
    evaluation = Evaluation(
        queue, PROMPTS, settings, SETTINGS, (1,), answer_requests(peer, lose_one, [])
    )
    with fails(ExitCode.ENGINE_FAILED) if is_error else contextlib.nullcontext():
        assert evaluation.measure("4").num_rejected == 3


def lose_one(request: GroupRequest) -> GroupDone:
    rollouts = (make_ref(make_rollout(2, 3)),) * (request.num_samples - 1)
    return group_done(request.group_id, rollouts, rejections={"expired": 1})


@dataclass
class Probe:
    """Requests two rollouts of two prompts, two more of the first, then one of another prompt."""

    groups_handled: list[tuple[int, int]] = field(default_factory=list)
    remaining_requests: list[RolloutRequest] = field(
        default_factory=lambda: [RolloutRequest(2, PROMPTS[2], 1)]
    )

    def first_round(self) -> list[RolloutRequest]:
        return [RolloutRequest(0, PROMPTS[0], 2), RolloutRequest(1, PROMPTS[1], 2)]

    def handle_group(self, index: int, group: Group) -> RolloutRequest | None:
        self.groups_handled.append((index, len(group.rollouts)))
        self.groups = {**self.__dict__.get("groups", {}), index: group}
        return (
            RolloutRequest(0, PROMPTS[0], 2, first_sample=2)
            if self.groups_handled[-1] == (0, 2)
            else None
        )

    def next_round(self) -> list[RolloutRequest]:
        requests = self.remaining_requests
        self.remaining_requests = []
        return requests

    def num_needed(self) -> None:
        pass

    def result(self) -> SelectionResult:
        return SelectionResult(
            groups=(self.groups[0],),
            stopped_groups=(self.groups[1],),
            surplus_groups=(self.groups[2],),
        )

    def metrics(self) -> dict[str, float]:
        return {"select/rounds": 2.0}


def answer_by_sample_index(request: GroupRequest) -> GroupDone:
    """Answer with all rollouts, and one more rejection for an extension."""
    ref = msgspec.structs.replace(make_ref(make_rollout(2, 3)), num_generated=3)
    refs = tuple(
        msgspec.structs.replace(ref, sample_index=request.first_sample + i)
        for i in range(request.num_samples)
    )
    rejections = {"engine": 1} if request.first_sample else {}
    return group_done(request.group_id, refs, rejections=rejections)


def test_an_extended_group_is_one_group(hub: CollectorHub, peer: Peer) -> None:
    requests: list[GroupRequest] = []
    probe = Probe()
    selector: Any = SimpleNamespace(select=lambda step: probe, state=lambda: None)
    idle = answer_requests(peer, answer_by_sample_index, requests)
    sampler = RolloutSampler(synced_queue(hub), SETTINGS, selector, (1,), idle)
    batch = sampler.sample(4)
    assert sorted(probe.groups_handled) == [(0, 2), (0, 4), (1, 2), (2, 1)]
    assert [r.group_id for r in requests] == ["step-4-0", "step-4-1", "step-4-0+2", "step-4-2"]
    assert sorted(batch.delivered_ids) == ["step-4-0", "step-4-0+2", "step-4-1", "step-4-2"]
    (extended_group,) = batch.groups
    assert extended_group.group_id == "step-4-0"
    assert [r.sample_index for r in extended_group.rollouts] == [0, 1, 2, 3]
    assert extended_group.rejections == {"engine": 1}
    left_out = batch.stopped_groups + batch.surplus_groups
    assert [group.group_id for group in left_out] == ["step-4-1", "step-4-2"]
    metrics = batch.metrics()
    assert metrics["rollout/samples"] == 7.0
    assert metrics["rollout/rejected"] == 1.0
    assert metrics["select/rounds"] == 2.0


def test_parts_of_a_group_merge_all_that_they_count() -> None:
    ref = make_ref(make_rollout(2, 3))
    first, rest = (
        msgspec.structs.replace(
            group_done(name, (ref,) * count).group,
            rejections=rejections,
            rejected_tokens=tokens,
            environment_error=error,
            generated_at=generated_at,
            scored_at=scored_at,
        )
        for name, count, rejections, tokens, error, generated_at, scored_at in (
            ("a", 1, {"engine": 1}, {"engine": 5}, "", 4.0, 4.5),
            ("a+1", 2, {"engine": 2, "expired": 1}, {"engine": 7, "stale": 2}, "no tool", 3.0, 5.5),
        )
    )
    group = merge_groups(first, rest)
    assert (group.group_id, len(group.rollouts)) == ("a", 3)
    assert group.rejections == {"engine": 3, "expired": 1}
    assert group.rejected_tokens == {"engine": 12, "stale": 2}
    assert group.environment_error == merge_groups(rest, first).environment_error == "no tool"
    assert (group.generated_at, group.scored_at) == (4.0, 5.5)


def test_rewards_of_a_batch_by_hand() -> None:
    """Rollouts without a verdict count apart."""
    ref = make_ref(make_rollout(2, 3))
    verdicts = (
        Verdict(reward=1.0, correctness=1.0),
        Verdict(reward=0.5, correctness=1.0),
        Verdict(reward=None, correctness=None, reason="no judge"),
        Verdict(reward=None, correctness=None, reason="timeout"),
    )
    refs = tuple(msgspec.structs.replace(ref, verdict=verdict) for verdict in verdicts)
    metrics = RolloutBatch((group_done("a", refs).group,), 1).metrics()
    assert [metrics[name] for name in ("reward/mean", "reward/no_verdict")] == [0.75, 2]
    metrics = RolloutBatch((group_done("a", refs[3:]).group,), 1).metrics()
    assert "reward/mean" not in metrics


def _receive_groups(hub: CollectorHub, count: int) -> None:
    """Wait until so many groups have arrived that nobody has read."""
    deadline = time.monotonic() + 10
    while sum(isinstance(message, GroupDone) for _, message in hub._inbox) < count:
        assert time.monotonic() < deadline
        hub._receive(0.2)


def test_groups_that_are_lost_during_a_batch_are_sampled_again(
    hub: CollectorHub, peer: Peer
) -> None:
    """The collector ends after it delivered its groups."""
    requests: list[GroupRequest] = []
    others: list[Peer] = []

    def answer() -> None:
        if not others:
            new_requests = [m for m in peer.receive(3) if isinstance(m, GroupRequest)]
            requests.extend(new_requests)
            for request in reversed(new_requests):
                peer.send(answer_with_one_rejection(request))
            _receive_groups(hub, len(new_requests))
            others.append(Peer(hub, 0, epoch=1))
        answer_requests(others[0], answer_with_one_rejection, requests)()

    sampler = RolloutSampler(synced_queue(hub), SETTINGS, FixedPrompts(PROMPTS, 2), (1,), answer)
    batch = sampler.sample(4)
    assert [group.group_id for group in batch.groups] == ["step-4-0", "step-4-1", "step-4-2"]
    assert len({request.group_id for request in requests}) == 3
    for request in requests[3:]:
        assert request in requests[:3]
    assert sampler.queue.lost_groups(batch.delivered_ids) == []
    assert batch.num_repeated == len(requests) - 3 > 0
    for other in others:
        other.close()


def test_rollouts_that_ranks_could_not_read_are_sampled_again(
    hub: CollectorHub, peer: Peer
) -> None:
    requests: list[GroupRequest] = []

    def answer(request: GroupRequest) -> GroupDone:
        ref = msgspec.structs.replace(
            make_ref(make_rollout(2, 3)), rollout_id=f"{request.group_id}/0"
        )
        return group_done(request.group_id, (ref,))

    idle = answer_requests(peer, answer, requests)
    sampler = RolloutSampler(synced_queue(hub), SETTINGS, FixedPrompts(PROMPTS, 2), (1,), idle)
    batch = sampler.sample(4)
    new_batch = sampler.sample_again(4, batch, ["step-4-1/0", "unknown"])
    assert [request.group_id for request in requests] == [
        "step-4-0",
        "step-4-1",
        "step-4-2",
        "step-4-1",
    ]
    assert requests[3] == requests[1]
    assert new_batch.delivered_ids == batch.delivered_ids
    assert new_batch.num_repeated == 1
    sampler.queue.drop(new_batch.delivered_ids)
