import msgspec
import pytest

from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rollouts.evaluation import LostEvaluation, accuracy_of
from support.rollouts import make_ref, make_rollout


def group(*verdicts: Verdict, finish: FinishReason = FinishReason.STOP) -> Group:
    base = msgspec.structs.replace(make_ref(make_rollout(2, 2)), finish_reason=finish)
    samples = tuple(msgspec.structs.replace(base, verdict=v) for v in verdicts)
    return Group(group_id="g", prompt=Prompt(id="p", token_ids=(1,), answer="1", task="t"), rollouts=samples)


RIGHT = Verdict(reward=1.0, correctness=1.0, answer="12")
WRONG = Verdict(reward=0.0, correctness=0.0, answer="13")
UNPARSED = Verdict(reward=0.0, correctness=0.0)
NONE = Verdict(reward=None, correctness=None, reason="timeout")


def test_by_hand() -> None:
    # question means 1, 1/2 and 0: mean 1/2, variance 1/4, half width 1.959964 * sqrt(1/12) = 0.565793
    result = accuracy_of([group(RIGHT, RIGHT), group(RIGHT, WRONG), group(WRONG, UNPARSED)], 2)
    assert result.accuracy == pytest.approx(0.5)
    assert result.half_width == pytest.approx(0.565793, abs=1e-6)
    assert result.parseable == pytest.approx(5 / 6)
    assert result.finished == 1.0


def test_missing_samples_and_missing_verdicts_count_as_wrong() -> None:
    result = accuracy_of([group(RIGHT), group(RIGHT, NONE)], 2)
    assert result.accuracy == pytest.approx(0.5)


def test_a_truncated_response_is_not_parseable() -> None:
    assert accuracy_of([group(RIGHT, finish=FinishReason.LENGTH)], 1).parseable == 0.0


def test_no_question_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.num_eval"):
        accuracy_of([], 1)


def test_a_request_without_an_answer_is_not_a_wrong_answer() -> None:
    lost = msgspec.structs.replace(group(RIGHT), rejected={"engine": 1})
    with pytest.raises(LostEvaluation, match="1 requests"):
        accuracy_of([lost], 2)
    assert accuracy_of([msgspec.structs.replace(group(RIGHT), rejected={"empty": 1})], 2).rejected == 1
