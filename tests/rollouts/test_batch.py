from collections.abc import Callable

import pytest

from megatron_rl.config.schema import EvalSettings, RolloutSettings
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.rollouts.batch import NothingCameBack, RolloutStage
from megatron_rl.rollouts.evaluation import Evaluation
from megatron_rl.rollouts.hub import Hub
from megatron_rl.rollouts.messages import GroupDone, GroupRequest
from megatron_rl.rollouts.queue import RolloutQueue
from support.collectors import Peer, done
from support.rollouts import make_ref, make_rollout

PROMPTS = [Prompt(id=name, token_ids=(1, 2), answer="3", task="t") for name in "abc"]
SETTINGS = RolloutSettings(max_new_tokens=8, samples_per_prompt=2, temperature=0.7, max_staleness=9)


def answering(peer: Peer, answer: Callable[[GroupRequest], GroupDone], asked: list[GroupRequest]) -> Callable[[], None]:
    """An `idle` in which the collector answers what it was asked, the last question first."""

    def idle() -> None:
        requests = [message for message in peer.hear() if isinstance(message, GroupRequest)]
        asked.extend(requests)
        for request in reversed(requests):
            peer.say(answer(request))

    return idle


def test_groups_come_in_the_order_of_their_prompts_and_are_counted(hub: Hub, peer: Peer) -> None:
    def answer(request: GroupRequest) -> GroupDone:
        right, wrong = make_ref(make_rollout(2, 3)), make_ref(make_rollout(2, 5), reward=0.0)
        samples = (right,) if request.group_id == "step-4-1" else (right, wrong)
        rejected = {"engine": 1} if len(samples) == 1 else {}
        return done(request.group_id, samples, rejected=rejected, generated_at=2.0, judged_at=2.5)

    asked: list[GroupRequest] = []
    stage = RolloutStage(RolloutQueue(hub, SETTINGS), SETTINGS, (1,), answering(peer, answer, asked))
    batch = stage.draw("step-4", PROMPTS)
    assert batch.group_ids == [r.group_id for r in asked] == ["step-4-0", "step-4-1", "step-4-2"]
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
        "reward/mean": pytest.approx(0.6),
        "reward/no_verdict": 0.0,
        "time/reward_exposed": 0.5,
    }


def test_a_batch_of_which_nothing_came_back_ends_the_run(hub: Hub, peer: Peer) -> None:
    idle = answering(peer, lambda request: done(request.group_id, rejected={"engine": 2}), [])
    with pytest.raises(NothingCameBack, match="'engine': 6"):
        RolloutStage(RolloutQueue(hub, SETTINGS), SETTINGS, (1,), idle).draw("step-4", PROMPTS)


def test_an_evaluation_draws_as_training_does_unless_told_otherwise(hub: Hub, peer: Peer) -> None:
    asked: list[GroupRequest] = []
    idle = answering(peer, lambda r: done(r.group_id, (make_ref(make_rollout(2, 3)),)), asked)
    queue = RolloutQueue(hub, SETTINGS)
    for temperature in (None, 0.0):
        settings = EvalSettings(samples_per_prompt=1, temperature=temperature)
        accuracy = Evaluation(queue, PROMPTS, settings, SETTINGS, (1,), idle).measure("4")
        assert (accuracy.accuracy, accuracy.questions) == (1.0, 3)
    assert [r.group_id for r in asked[:3]] == ["eval-4-0", "eval-4-1", "eval-4-2"]
    assert all(r.evaluation for r in asked)
    assert [r.sampling.temperature for r in asked] == [0.7] * 3 + [0.0] * 3
