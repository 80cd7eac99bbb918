"""Calls of the calculator, sampled and demonstrated."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.environments.calculator import Calculator, answer_call, demonstrate_calls
from megatron_rl.environments.episode import Response
from megatron_rl.prompts import column_addition, column_addition_calls


class ScriptedEpisode:
    """Gives the responses of a script, and records what an environment adds."""

    def __init__(self, *responses: str, ending: FinishReason = FinishReason.STOP) -> None:
        self.responses = list(responses)
        self.ending = ending
        self.record: list[tuple[str, str]] = []

    async def respond(self) -> Response:
        text = self.responses.pop(0)
        self.record.append(("respond", text))
        return Response(text, FinishReason.STOP if self.responses else self.ending)

    def observe(self, text: str) -> None:
        self.record.append(("observe", text))

    def demonstrate(self, text: str) -> None:
        self.record.append(("demonstrate", text))


def play(episode: Any) -> list[tuple[str, str]]:
    asyncio.run(Calculator().play(episode))
    record: list[tuple[str, str]] = episode.record
    return record


def test_the_model_reads_the_sum_and_goes_on_until_it_makes_no_call() -> None:
    assert play(ScriptedEpisode("a3+8=", "b1+3+1=", ">51")) == [
        ("respond", "a3+8="),
        ("observe", "11"),
        ("respond", "b1+3+1="),
        ("observe", "05"),
        ("respond", ">51"),
    ]


def test_a_response_that_was_cut_off_gets_no_sum() -> None:
    assert play(ScriptedEpisode("3+8=", ending=FinishReason.LENGTH)) == [("respond", "3+8=")]


def test_a_model_that_only_calls_is_ended() -> None:
    record = play(ScriptedEpisode(*["1+1="] * 99))
    assert record.count(("respond", "1+1=")) == 32


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("3+8=", "11"),
        ("x 0+5=", "05"),
        ("999999999+1=", "1000000000"),
        ("1+2+3+4+5+6+7+8=", "36"),
        ("3+8= ", None),
        ("3+8", None),
        ("8=", None),
        ("+8=", None),
        ("3*8=", None),
        ("", None),
        ("٣+٨=", None),
        ("3+8=\n", None),
    ],
)
def test_only_sums_at_the_end_of_a_response_are_calls(text: str, result: str | None) -> None:
    assert answer_call(text) == result


@given(st.text(alphabet="0123456789+= a", max_size=40))
def test_no_text_makes_the_calculator_fail(text: str) -> None:
    result = answer_call(text)
    assert result is None or result.isdecimal()


def test_demonstrated_results_are_read_and_not_trained() -> None:
    episode: Any = ScriptedEpisode()
    demonstrate_calls(episode, "a3+8=11b1+3+1=05>51")
    assert episode.record == [
        ("demonstrate", "a3+8="),
        ("observe", "11"),
        ("demonstrate", "b1+3+1="),
        ("observe", "05"),
        ("demonstrate", ">51"),
    ]


def test_a_demonstration_with_a_wrong_result_is_refused() -> None:
    episode: Any = ScriptedEpisode()
    with pytest.raises(ValueError, match="another result than 11"):
        demonstrate_calls(episode, "a3+8=12>2")


def test_demonstrations_of_the_task_are_what_the_calculator_plays() -> None:
    """Playing the demonstrated responses gives the demonstrated results."""
    questions = column_addition_calls.questions(0)
    plain_questions = column_addition.questions(0)
    for _ in range(200):
        question = next(questions)
        plain_question = next(plain_questions)
        assert (question.text, question.answer) == (plain_question.text, plain_question.answer)
        assert question.identity == plain_question.identity
        demonstration: Any = ScriptedEpisode()
        demonstrate_calls(demonstration, question.demonstration)
        responses = [text for kind, text in demonstration.record if kind == "demonstrate"]
        assert responses[-1] == f">{question.answer}"
        play_record = play(ScriptedEpisode(*responses))
        assert [text for kind, text in play_record if kind == "observe"] == [
            text for kind, text in demonstration.record if kind == "observe"
        ]


def test_a_worked_question_by_hand() -> None:
    assert column_addition_calls.calls_of("a38b13c65=") == "a3+8=11b1+3+1=05c6+5+0=11"


@pytest.mark.parametrize("text", ["1234567890+1=", "1+1+1+1+1+1+1+1+1="])
def test_the_end_of_a_sum_that_is_too_long_is_no_call(text: str) -> None:
    assert answer_call(text) is None
