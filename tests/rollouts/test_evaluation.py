"""Accuracy of evaluations."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import EvalSetSettings, EvalSettings, RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rollouts.evaluation import evaluation
from megatron_rl.rollouts.evaluation.evaluation import Accuracy, Evaluation
from megatron_rl.rollouts.evaluation.set_result import measure_set
from megatron_rl.rollouts.wire.messages import GroupRequest
from megatron_rl.rollouts.wire.rejections import UserClassFailed
from tests.support.failures import fails
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import make_rollout


def group(*verdicts: Verdict, finish: FinishReason = FinishReason.STOP) -> Group:
    base = msgspec.structs.replace(make_ref(make_rollout(2, 2)), finish_reason=finish)
    samples = tuple(msgspec.structs.replace(base, verdict=v) for v in verdicts)
    return Group(
        group_id="g", prompt=Prompt(id="p", token_ids=(1,), answer="1", task="t"), rollouts=samples
    )


def accuracy_of(groups: list[Group], samples_per_prompt: int, share: float = 1.0) -> Accuracy:
    return evaluation.accuracy_of(groups, samples_per_prompt, max_rejected_share=share)


def group_with_losses(count: int, reason: str = "expired") -> Group:
    return msgspec.structs.replace(group(), rejections={reason: count})


CORRECT = Verdict(reward=1.0, correctness=1.0, answer="12")
INCORRECT = Verdict(reward=0.0, correctness=0.0, answer="13")
UNPARSEABLE = Verdict(reward=0.0, correctness=0.0)
NO_VERDICT = Verdict(reward=None, correctness=None, reason="timeout")


def test_accuracy_computed_by_hand() -> None:
    # Question means 1, 1/2 and 0: mean 1/2, variance 1/4,
    # half width 1.959964 * sqrt(1/12) = 0.565793
    result = accuracy_of(
        [group(CORRECT, CORRECT), group(CORRECT, INCORRECT), group(INCORRECT, UNPARSEABLE)], 2
    )
    assert result.accuracy == pytest.approx(0.5)
    assert result.half_width == pytest.approx(0.565793, abs=1e-6)
    assert result.parseable == pytest.approx(5 / 6)
    assert result.ended_share == 1.0


def test_missing_rollouts_and_verdicts_count_as_incorrect() -> None:
    result = accuracy_of([group(CORRECT), group(CORRECT, NO_VERDICT)], 2)
    assert result.accuracy == pytest.approx(0.5)


def test_a_truncated_response_is_not_parseable() -> None:
    assert accuracy_of([group(CORRECT, finish=FinishReason.LENGTH)], 1).parseable == 0.0


def judged_group(*rewards: float) -> Group:
    """Group whose scorer knows no correct answer."""
    return group(*[Verdict(reward=reward, correctness=None) for reward in rewards])


def test_rewards_without_correctness_have_a_mean_reward_and_no_accuracy() -> None:
    # Question means 0.8 and 0.6: mean 0.7, half width 1.959964 * sqrt(0.02 / 2) = 0.195996
    result = accuracy_of([judged_group(0.9, 0.7), judged_group(0.6)], 2)
    assert (result.accuracy, result.half_width) == (None, 0.0)
    assert result.reward == pytest.approx(0.7)
    metrics = result.metrics()
    assert metrics["eval/reward"] == pytest.approx(0.7)
    assert metrics["eval/reward_ci95"] == pytest.approx(0.195996, abs=1e-6)
    assert {"eval/accuracy", "eval/accuracy_ci95"}.isdisjoint(metrics)
    assert str(result).startswith("unknown, reward 0.700 ± 0.196 (2 questions x 2, ")


def test_judged_groups_do_not_lower_the_accuracy_of_others() -> None:
    result = accuracy_of([group(CORRECT), judged_group(0.5), group_with_losses(1)], 1)
    assert result.accuracy == pytest.approx(0.5)
    assert result.reward == pytest.approx(0.5)
    assert accuracy_of([group(CORRECT)], 1).reward is None


def test_order_of_completion_does_not_change_the_accuracy() -> None:
    """Sums of thirds depend on the order of their terms."""
    groups = [group(*[CORRECT] * (i % 4), *[INCORRECT] * (3 - i % 4)) for i in range(512)]
    requests = []

    class ShuffledQueue:
        def submit(self, new_requests: list[GroupRequest]) -> None:
            requests[:] = new_requests

        def as_completed(self, idle: object, **_: object) -> list[Group]:
            results = [
                msgspec.structs.replace(result, group_id=request.group_id)
                for request, result in zip(requests, groups, strict=True)
            ]
            random.Random(len(results)).shuffle(results)
            return results

    queue: Any = ShuffledQueue()
    prompts = [base.prompt for base in groups]
    evals = EvalSettings(samples_per_prompt=3)
    measurement = Evaluation(
        queue, prompts, evals, RolloutSettings(max_new_tokens=8), (0,), lambda: None
    )
    assert measurement.measure("1").accuracy == accuracy_of(groups, 3).accuracy
    assert [g.group_id for g in measurement.sample("2")] == [f"eval-2-{i}" for i in range(512)]


def test_an_evaluation_without_questions_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.num_eval"):
        accuracy_of([], 1)


def test_an_expired_response_counts_as_incorrect_and_not_ended() -> None:
    """A run continues after one expired response."""
    result = accuracy_of([group(CORRECT)] * 9 + [group_with_losses(1)], 1, 0.1)
    assert (result.accuracy, result.ended_share, result.parseable, result.num_rejected) == (
        0.9,
        0.9,
        0.9,
        1,
    )


@pytest.mark.parametrize("reason", ["expired", "aborted", "engine", "logprobs_nonfinite"])
def test_an_evaluation_with_too_many_losses_fails(reason: str) -> None:
    """With NaN weights every response is rejected. That is an error, not 0.000 ± 0.000."""
    accuracy_of([group(CORRECT)] * 9 + [group_with_losses(1, reason)], 1, 0.1)
    with fails(
        ExitCode.ENGINE_FAILED, match=rf"1 of 9 .*\(1 {reason} .*; 0\.1 is the largest share "
    ):
        accuracy_of([group(CORRECT)] * 8 + [group_with_losses(1, reason)], 1, 0.1)
    with fails(ExitCode.ENGINE_FAILED, match="4 of 4"):
        accuracy_of([group_with_losses(2, reason), group_with_losses(2, reason)], 2, 1.0)


@pytest.mark.parametrize("reason", ["environment", "no_response"])
def test_a_failing_environment_is_refused_with_its_error(reason: str) -> None:
    lost_group = msgspec.structs.replace(
        group_with_losses(1, reason), environment_error="mine.py:3, in play: KeyError: 'x'"
    )
    words = rf"1 {reason} \(the environment .*first: mine\.py:3, in play: KeyError"
    with pytest.raises(UserClassFailed, match=words):
        accuracy_of([lost_group], 1)


def test_the_message_about_aborted_responses_names_the_key() -> None:
    with fails(ExitCode.ENGINE_FAILED, match=r"1 aborted \(.*engine\.request_timeout_s"):
        accuracy_of([group_with_losses(1, "aborted")], 1)


def test_an_evaluation_whose_scorer_fails_is_refused() -> None:
    with pytest.raises(
        UserClassFailed, match=r"2 of 2 .*\(2 no_verdict \(the scorer failed.*reward=0\.0"
    ):
        accuracy_of([group(NO_VERDICT), group(NO_VERDICT)], 1, 0.1)
    assert accuracy_of([group(CORRECT)] * 9 + [group(NO_VERDICT)], 1, 0.1).num_rejected == 1


def test_text_and_metrics_of_an_accuracy() -> None:
    result = accuracy_of(
        [
            group(CORRECT, CORRECT, INCORRECT, UNPARSEABLE),
            msgspec.structs.replace(group(CORRECT), rejections={"a": 3}),
        ],
        4,
    )
    assert str(result) == "0.375 ± 0.245 (2 questions x 4, 50.0% parseable, 3 lost)"
    assert (
        str(accuracy_of([group(CORRECT, INCORRECT)], 2))
        == "0.500 ± 0.000 (1 questions x 2, 100.0% parseable)"
    )
    assert result.metrics() == {
        "eval/accuracy": 0.375,
        "eval/accuracy_ci95": pytest.approx(1.959964 * 0.125),
        "eval/parseable": 0.5,
        "eval/finished": 0.625,
        "eval/rejected": 3.0,
        "eval/questions": 2.0,
        "eval/version": 5.0,
    }


def group_of_version(*versions: int) -> Group:
    """A group with a response for each weight version."""
    responses = group(*[CORRECT] * len(versions))
    rollouts = zip(responses.rollouts, versions, strict=True)
    return msgspec.structs.replace(
        responses,
        rollouts=tuple(
            msgspec.structs.replace(ref, tokens_by_version=((v, 1),)) for ref, v in rollouts
        ),
    )


def test_an_evaluation_records_the_weight_version_of_its_responses() -> None:
    result = accuracy_of([group_of_version(7, 7), group_of_version(7)], 2)
    assert result.version == 7
    assert result.metrics()["eval/version"] == 7.0
    assert accuracy_of([group_with_losses(2), group(CORRECT, CORRECT)], 2).version == 5


def test_an_evaluation_of_several_weight_versions_is_refused() -> None:
    with fails(ExitCode.ENGINE_FAILED, match=r"weight versions \[6, 7\]"):
        accuracy_of([group_of_version(7, 7), group_of_version(6)], 2)


class RecordingQueue:
    """Answers every request with a correct response of a weight version, and keeps the requests."""

    def __init__(self, version: int = 3) -> None:
        self.requests: list[GroupRequest] = []
        self._version = version

    def submit(self, requests: list[GroupRequest]) -> None:
        self.requests = requests

    def as_completed(self, idle: Any, **_: object) -> list[Group]:
        count = self.requests[0].num_samples
        return [
            msgspec.structs.replace(
                group_of_version(*[self._version] * count), group_id=request.group_id
            )
            for request in self.requests
        ]


def test_a_set_is_sampled_with_its_own_settings() -> None:
    queue: Any = RecordingQueue()
    settings = EvalSettings(
        sets={
            "hard": EvalSetSettings(
                path="x", samples_per_prompt=2, temperature=0.0, top_p=0.9, max_new_tokens=99
            )
        },
        temperature=0.5,
    )
    prompt = Prompt(id="p", token_ids=(1,), answer="1", task="t")
    rollout = RolloutSettings(max_new_tokens=8)
    held_out = Evaluation(queue, [prompt], settings, rollout, (1,), lambda: None)
    result = measure_set("hard", replace(held_out, settings=settings.of_set("hard")), label="4-h")
    (request,) = queue.requests
    assert request.group_id == "eval-4-h-0" and request.evaluation
    assert request.num_samples == 2
    assert request.sampling == Sampling(
        max_new_tokens=99, temperature=0.0, top_p=0.9, stop_token_ids=(1,)
    )
    assert result.metrics()["eval/hard/version"] == 3.0
    assert result.metrics()["eval/hard/pass@2"] == 1.0
    held_out.measure("4")
    (request,) = queue.requests
    assert request.sampling == Sampling(max_new_tokens=8, temperature=0.5, stop_token_ids=(1,))


def test_an_evaluation_that_is_aborted_leaves_no_requests() -> None:
    class AbortedQueue(RecordingQueue):
        dropped_ids: tuple[str, ...] = ()

        def as_completed(self, idle: Any, **options: Any) -> Any:
            raise RuntimeError("aborted")

        def drop(self, group_ids: list[str]) -> None:
            self.dropped_ids = tuple(group_ids)

    queue: Any = AbortedQueue()
    prompt = Prompt(id="p", token_ids=(1,), answer="1", task="t")
    rollout = RolloutSettings(max_new_tokens=8)
    evaluation = Evaluation(queue, [prompt] * 2, EvalSettings(), rollout, (0,), lambda: None)
    with pytest.raises(RuntimeError, match="aborted"):
        evaluation.measure("3")
    assert queue.dropped_ids == ("eval-3-0", "eval-3-1")
