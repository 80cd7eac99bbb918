import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import msgspec
import pytest

from launch.testbed.rollout_refs import make_ref
from launch.testbed.selectors import FixedPrompts
from megatron_rl.config.schema import EvalSettings, RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, RolloutLocation, Verdict
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult
from megatron_rl.rollouts.evaluation import Evaluation, EvaluationFailed
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.messages import EngineLeftOut, GroupDone, GroupRequest
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.rejections import UserClassFailed
from megatron_rl.rollouts.rollout_batch import RolloutBatch, RolloutSampler, TooManyRejected
from tests.support.collectors import Peer, done
from tests.support.rollouts import VERSION, make_rollout

PROMPTS = [Prompt(id=name, token_ids=(1, 2), answer="3", task="t") for name in "abc"]
SETTINGS = RolloutSettings(max_new_tokens=8, samples_per_prompt=2, temperature=0.7)


def synced(hub: CollectorHub, settings: RolloutSettings = SETTINGS) -> RolloutQueue:
    """A queue whose engines have the weights that `make_rollout`'s responses are drawn with."""
    queue = RolloutQueue(hub, settings)
    queue.set_version(VERSION)
    return queue


def answering(
    peer: Peer, answer: Callable[[GroupRequest], GroupDone], asked: list[GroupRequest]
) -> Callable[[], None]:
    """An `idle` in which the collector answers what it was asked, the last question first."""

    def idle() -> None:
        requests = [message for message in peer.hear() if isinstance(message, GroupRequest)]
        asked.extend(requests)
        for request in reversed(requests):
            peer.say(answer(request))

    return idle


def test_groups_come_in_the_order_of_their_prompts_and_are_counted(hub: CollectorHub, peer: Peer) -> None:
    def answer(request: GroupRequest) -> GroupDone:
        right, wrong = make_ref(make_rollout(2, 3)), make_ref(make_rollout(2, 5), reward=0.0)
        samples = (right,) if request.group_id == "step-4-1" else (right, wrong)
        rejected = {"engine": 1} if len(samples) == 1 else {}
        return done(request.group_id, samples, rejections=rejected, generated_at=2.0, scored_at=2.5)

    asked: list[GroupRequest] = []
    sampler = RolloutSampler(
        synced(hub), SETTINGS, FixedPrompts(PROMPTS, 2), (1,), answering(peer, answer, asked)
    )
    batch = sampler.sample(4)
    assert list(batch.delivered_ids) == ["step-4-0", "step-4-1", "step-4-2"]
    assert (
        [g.group_id for g in batch.groups]
        == [r.group_id for r in asked]
        == ["step-4-0", "step-4-1", "step-4-2"]
    )
    assert [r.prompt for r in asked] == PROMPTS
    assert all(r.num_samples == 2 and not r.evaluation for r in asked)
    assert asked[0].sampling == Sampling(max_new_tokens=8, temperature=0.7, stop_token_ids=(1,))
    assert batch.metrics() == {
        "rollout/tokens": 15.0,
        "rollout/samples": 5.0,
        "rollout/rejected": 1.0,
        "rollout/rejected/engine": 1.0,
        "rollout/response_length": pytest.approx((3 * 3 + 2 * 5) / 5),
        "rollout/truncated": 0.0,
        "rollout/engines_left_out": 0.0,
        "reward/mean": pytest.approx(0.6),
        "reward/no_verdict": 0.0,
        "time/reward_exposed": 0.5,
    }
    assert sampler.sample(5).generated_tokens == 15  # of this batch, not of all


def test_truncated_responses_are_a_share() -> None:
    ref = make_ref(make_rollout(2, 3))
    cut = msgspec.structs.replace(ref, finish_reason=FinishReason.LENGTH)
    assert (
        RolloutBatch((done("a", (ref, cut, cut, cut)).group,), 1).metrics()["rollout/truncated"]
        == 0.75
    )


def draw(
    hub: CollectorHub, peer: Peer, answer: Callable[[GroupRequest], GroupDone], share: float = 0.5
) -> RolloutBatch:
    settings = replace(SETTINGS, max_rejected_share=share)
    given = FixedPrompts(PROMPTS, 2)
    return RolloutSampler(
        synced(hub, settings), settings, given, (1,), answering(peer, answer, [])
    ).sample(4)


def losing(count: int, reason: str = "engine") -> Callable[[GroupRequest], GroupDone]:
    """Of the first group's two rollouts `count` are rejected, of the others' none."""
    kept = (make_ref(make_rollout(2, 3)),) * 2

    def answer(request: GroupRequest) -> GroupDone:
        lost = count if request.group_id == "step-4-0" else 0
        return done(request.group_id, kept[lost:], rejections={reason: lost} if lost else {})

    return answer


def test_a_batch_that_lost_too_many_rollouts_ends_the_run_by_reason(hub: CollectorHub, peer: Peer) -> None:
    assert draw(hub, peer, losing(2), share=1 / 3).rejections == {"engine": 2}  # 2 of 6
    with pytest.raises(TooManyRejected) as caught:
        draw(hub, peer, losing(2), share=0.33)
    words = "batch step-4: 2 of 6 rollouts cannot be used (2 engine (no engine answered)); rollout.max_rejected_share=0.33"
    assert str(caught.value).startswith(words) and "logs/collector-*.log" in str(caught.value)
    assert isinstance(caught.value, Failure) and caught.value.exit_code is ExitCode.ENGINE_FAILED


def test_a_batch_of_which_nothing_came_back_ends_the_run_whatever_may_be_lost(
    hub: CollectorHub, peer: Peer
) -> None:
    with pytest.raises(
        TooManyRejected, match=r"6 of 6 rollouts cannot be used \(6 logprobs_nonfinite \(.* NaN"
    ):
        draw(
            hub,
            peer,
            lambda request: done(request.group_id, rejections={"logprobs_nonfinite": 2}),
            share=1.0,
        )


def test_engines_that_are_left_out_are_a_metric(hub: CollectorHub, peer: Peer) -> None:
    def answer(request: GroupRequest) -> GroupDone:
        peer.say(EngineLeftOut("http://e", "500"))
        return done(request.group_id, (make_ref(make_rollout(2, 3)),) * 2)

    assert draw(hub, peer, answer).metrics()["rollout/engines_left_out"] == 1.0


def test_a_rollout_without_a_verdict_cannot_be_used_either(hub: CollectorHub, peer: Peer) -> None:
    none = Verdict(reward=None, correctness=None, reason="timeout")
    unjudged = msgspec.structs.replace(make_ref(make_rollout(2, 3)), verdict=none)
    with pytest.raises(
        UserClassFailed, match=r"6 of 6 .* \(6 no_verdict \(the scorer failed, .*reward\.timeout_s"
    ):
        draw(hub, peer, lambda request: done(request.group_id, (unjudged, unjudged)))


def test_judging_is_timed_by_the_clock_of_each_node(hub: CollectorHub, peer: Peer) -> None:
    """Monotonic clocks start when a machine does: between nodes they differ by weeks."""

    def on_node(node: int, generated: float, judged: float) -> Group:
        where = RolloutLocation(node=node, pid=1, fd=1, offset=0, nbytes=0)
        ref = make_ref(make_rollout(2, 3), where)
        return done("a", (ref,), generated_at=generated, scored_at=judged).group

    lost = msgspec.structs.replace(on_node(1, 9e9, 9e9), rollouts=())
    groups = (on_node(0, 10.0, 10.5), on_node(0, 10.2, 11.0), on_node(1, 5e6, 5e6 + 0.25), lost)
    assert RolloutBatch(groups, 1).reward_exposed == pytest.approx(0.8)
    assert RolloutBatch((lost,), 1).reward_exposed == 0.0


def test_an_evaluation_draws_as_training_does_unless_told_otherwise(hub: CollectorHub, peer: Peer) -> None:
    asked: list[GroupRequest] = []
    idle = answering(peer, lambda r: done(r.group_id, (make_ref(make_rollout(2, 3)),)), asked)
    queue = synced(hub)
    for temperature in (None, 0.0):
        settings = EvalSettings(samples_per_prompt=1, temperature=temperature)
        accuracy = Evaluation(queue, PROMPTS, settings, SETTINGS, (1,), idle).measure("4")
        assert (accuracy.accuracy, accuracy.questions) == (1.0, 3)
    assert [r.group_id for r in asked[:3]] == ["eval-4-0", "eval-4-1", "eval-4-2"]
    assert all(r.evaluation for r in asked)
    assert {(r.sampling.max_new_tokens, r.sampling.stop_token_ids) for r in asked} == {(8, (1,))}
    assert [r.sampling.temperature for r in asked] == [0.7] * 3 + [0.0] * 3


@pytest.mark.parametrize(("share", "lost"), [(0.5, False), (0.3, True)])
def test_an_evaluation_may_lose_what_its_key_allows(
    hub: CollectorHub, peer: Peer, share: float, lost: bool
) -> None:
    queue, settings = synced(hub), EvalSettings(samples_per_prompt=2, max_rejected_share=share)
    evaluation = Evaluation(
        queue, PROMPTS, settings, SETTINGS, (1,), answering(peer, half_lost, [])
    )
    with pytest.raises(EvaluationFailed) if lost else contextlib.nullcontext():
        assert evaluation.measure("4").num_rejected == 3


def half_lost(request: GroupRequest) -> GroupDone:
    return done(request.group_id, (make_ref(make_rollout(2, 3)),), rejections={"expired": 1})


@dataclass
class Probing:
    """Asks two rollouts of each prompt, two more of the first, and another prompt once these are
    there.
    """

    heard: list[tuple[int, int]] = field(default_factory=list)
    later: list[RolloutRequest] = field(default_factory=lambda: [RolloutRequest(2, PROMPTS[2], 1)])

    def first_round(self) -> list[RolloutRequest]:
        return [RolloutRequest(0, PROMPTS[0], 2), RolloutRequest(1, PROMPTS[1], 2)]

    def handle_group(self, index: int, group: Group) -> RolloutRequest | None:
        self.heard.append((index, len(group.rollouts)))
        self.groups = {**self.__dict__.get("groups", {}), index: group}
        return (
            RolloutRequest(0, PROMPTS[0], 2, first_sample=2) if self.heard[-1] == (0, 2) else None
        )

    def next_round(self) -> list[RolloutRequest]:
        later, self.later = self.later, []
        return later

    def result(self) -> SelectionResult:
        return SelectionResult(
            groups=(self.groups[0],), stopped=(self.groups[1],), surplus=(self.groups[2],)
        )

    def metrics(self) -> dict[str, float]:
        return {"select/rounds": 2.0}


def test_a_group_that_is_extended_is_one_group_and_a_further_round_is_asked(
    hub: CollectorHub, peer: Peer
) -> None:
    def answer(request: GroupRequest) -> GroupDone:
        refs = tuple(
            msgspec.structs.replace(
                make_ref(make_rollout(2, 3)), sample_index=request.first_sample + i, num_generated=3
            )
            for i in range(request.num_samples)
        )
        return done(request.group_id, refs, rejections={"engine": 1} if request.first_sample else {})

    asked: list[GroupRequest] = []
    probing = Probing()
    selector = SimpleNamespace(select=lambda step: probing)
    sampler = RolloutSampler(synced(hub), SETTINGS, selector, (1,), answering(peer, answer, asked))  # type: ignore[arg-type]
    batch = sampler.sample(4)
    assert sorted(probing.heard) == [(0, 2), (0, 4), (1, 2), (2, 1)]
    assert [r.group_id for r in asked] == ["step-4-0", "step-4-1", "step-4-0+2", "step-4-2"]
    assert sorted(batch.delivered_ids) == ["step-4-0", "step-4-0+2", "step-4-1", "step-4-2"]
    (whole,) = batch.groups
    assert (whole.group_id, [r.sample_index for r in whole.rollouts], whole.rejections) == (
        "step-4-0",
        [0, 1, 2, 3],
        {"engine": 1},
    )
    assert [g.group_id for g in batch.stopped_groups + batch.surplus_groups] == ["step-4-1", "step-4-2"]
    metrics = batch.metrics()
    assert (metrics["rollout/samples"], metrics["rollout/rejected"], metrics["select/rounds"]) == (
        7.0,
        1.0,
        2.0,
    )
