import msgspec
import pytest

from launch.testbed.rollout_refs import make_ref
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rollouts import evaluation
from megatron_rl.rollouts.evaluation import Accuracy, EvaluationFailed
from megatron_rl.rollouts.rejections import UserClassFailed
from tests.support.rollouts import make_rollout


def group(*verdicts: Verdict, finish: FinishReason = FinishReason.STOP) -> Group:
    base = msgspec.structs.replace(make_ref(make_rollout(2, 2)), finish_reason=finish)
    samples = tuple(msgspec.structs.replace(base, verdict=v) for v in verdicts)
    return Group(
        group_id="g", prompt=Prompt(id="p", token_ids=(1,), answer="1", task="t"), rollouts=samples
    )


def accuracy_of(groups: list[Group], samples_per_prompt: int, share: float = 1.0) -> Accuracy:
    return evaluation.accuracy_of(groups, samples_per_prompt, max_rejected_share=share)


def lost(count: int, reason: str = "expired") -> Group:
    return msgspec.structs.replace(group(), rejections={reason: count})


RIGHT = Verdict(reward=1.0, correctness=1.0, answer="12")
WRONG = Verdict(reward=0.0, correctness=0.0, answer="13")
UNPARSED = Verdict(reward=0.0, correctness=0.0)
NONE = Verdict(reward=None, correctness=None, reason="timeout")


def test_by_hand() -> None:
    # question means 1, 1/2 and 0: mean 1/2, variance 1/4, half width 1.959964 * sqrt(1/12) =
    # 0.565793
    result = accuracy_of([group(RIGHT, RIGHT), group(RIGHT, WRONG), group(WRONG, UNPARSED)], 2)
    assert result.accuracy == pytest.approx(0.5)
    assert result.half_width == pytest.approx(0.565793, abs=1e-6)
    assert result.parseable == pytest.approx(5 / 6)
    assert result.ended_share == 1.0


def test_missing_samples_and_missing_verdicts_count_as_wrong() -> None:
    result = accuracy_of([group(RIGHT), group(RIGHT, NONE)], 2)
    assert result.accuracy == pytest.approx(0.5)


def test_a_truncated_response_is_not_parseable() -> None:
    assert accuracy_of([group(RIGHT, finish=FinishReason.LENGTH)], 1).parseable == 0.0


def test_no_question_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.num_eval"):
        accuracy_of([], 1)


def test_an_expired_response_is_wrong_and_not_finished() -> None:
    """One response that an engine did not answer in time ends no run."""
    result = accuracy_of([group(RIGHT)] * 9 + [lost(1)], 1, 0.1)
    assert (result.accuracy, result.ended_share, result.parseable, result.num_rejected) == (
        0.9,
        0.9,
        0.9,
        1,
    )


@pytest.mark.parametrize("reason", ["expired", "engine", "logprobs_nonfinite"])
def test_an_evaluation_that_lost_too_many_responses_is_no_accuracy(reason: str) -> None:
    """With NaN weights every response is rejected: that is an error, not 0.000 ± 0.000."""
    accuracy_of([group(RIGHT)] * 9 + [lost(1, reason)], 1, 0.1)
    with pytest.raises(
        EvaluationFailed, match=rf"1 of 9 .*\(1 {reason} .*eval\.max_rejected_share=0\.1 "
    ):
        accuracy_of([group(RIGHT)] * 8 + [lost(1, reason)], 1, 0.1)
    with pytest.raises(EvaluationFailed, match="4 of 4"):
        accuracy_of([lost(2, reason), lost(2, reason)], 2, 1.0)


def test_an_evaluation_whose_scorer_fails_is_no_accuracy() -> None:
    with pytest.raises(UserClassFailed, match=r"2 of 2 .*\(2 no_verdict \(the scorer failed"):
        accuracy_of([group(NONE), group(NONE)], 1, 0.1)
    assert accuracy_of([group(RIGHT)] * 9 + [group(NONE)], 1, 0.1).num_rejected == 1


def test_an_accuracy_is_told_and_recorded_with_all_it_was_measured_on() -> None:
    result = accuracy_of(
        [
            group(RIGHT, RIGHT, WRONG, UNPARSED),
            msgspec.structs.replace(group(RIGHT), rejections={"a": 3}),
        ],
        4,
    )
    assert str(result) == "0.375 ± 0.245 (2 questions x 4, 50.0% parseable, 3 lost)"
    assert (
        str(accuracy_of([group(RIGHT, WRONG)], 2))
        == "0.500 ± 0.000 (1 questions x 2, 100.0% parseable)"
    )
    assert result.metrics() == {
        "eval/accuracy": 0.375,
        "eval/accuracy_ci95": pytest.approx(1.959964 * 0.125),
        "eval/parseable": 0.5,
        "eval/finished": 0.625,
        "eval/rejected": 3.0,
        "eval/questions": 2.0,
    }
