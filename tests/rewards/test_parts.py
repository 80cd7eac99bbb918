"""The verdict of several scorers, by hand."""

import asyncio

import pytest

from megatron_rl.config.schema import PartSettings, RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import ScorerInThisProcess, open_answer_reader
from megatron_rl.rewards.exact_match import ExactMatch
from megatron_rl.rewards.parts import Part, ScorerOfParts
from megatron_rl.rewards.runner import LOST, RewardRunner
from megatron_rl.rewards.user_calls import Ending, Outcome
from megatron_rl.rollouts.wire.messages import PROCESS_LOST
from megatron_rl.rollouts.wire.rejections import count_unusable
from tests.support.groups import group
from tests.support.questions import make_question


class FixedVerdict:
    """Calls that end with one verdict."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict

    async def score(
        self, prompt: Prompt, text: str, finish_reason: FinishReason, *, subject: str
    ) -> Outcome[Verdict]:
        return Outcome(Ending.RETURNED, value=self._verdict)


def grade(score: float, penalty: float = 0.0, answer: str | None = None) -> Verdict:
    return Verdict(reward=score, correctness=score, penalty=penalty, answer=answer)


def judge(reward: float) -> Verdict:
    return Verdict(reward=reward, correctness=None)


FAILED = Verdict(reward=None, correctness=None, reason="timeout")


def combine_parts(task: str = "t", **parts: tuple[PartSettings, Verdict]) -> Verdict:
    """Return the verdict of a response whose parts give these verdicts."""
    scorer = ScorerOfParts(
        [Part(name, settings, FixedVerdict(verdict)) for name, (settings, verdict) in parts.items()]
    )
    prompt = Prompt(id="p", token_ids=(1,), answer="4", task=task)
    return asyncio.run(RewardRunner(scorer).score(prompt, "4", FinishReason.STOP))


def part(
    weight: float | None = None, *, gate: bool = False, tasks: tuple[str, ...] = ()
) -> PartSettings:
    return PartSettings(name="exact_match", weight=weight, gate=gate, tasks=list(tasks))


def test_rewards_and_correctness_are_weighted_means() -> None:
    verdict = combine_parts(
        a=(part(), grade(1.0, penalty=0.2)),
        b=(part(3.0), grade(0.0, penalty=0.1, answer="7")),
        c=(part(0.5), grade(0.5)),
    )
    assert verdict.reward == verdict.correctness == pytest.approx(1.25 / 4.5, abs=1e-6)
    assert (verdict.penalty, verdict.answer) == (0.2, "7")
    assert verdict.parts == {"a": 1.0, "b": 0.0, "c": 0.5}


def test_parts_of_other_tasks_do_not_score() -> None:
    parts = {"a": (part(tasks=("x",)), grade(0.0)), "b": (part(tasks=("t", "x")), grade(1.0))}
    assert (combine_parts(**parts)).parts == {"b": 1.0}
    assert (combine_parts("x", **parts)).reward == 0.5
    nothing = combine_parts("y", **parts)
    assert nothing.reward is None and "no part with a weight" in nothing.reason


def test_a_part_of_weight_0_is_only_shown() -> None:
    verdict = combine_parts(a=(part(), judge(-2.0)), truth=(part(0.0), grade(1.0, penalty=0.9)))
    assert (verdict.reward, verdict.correctness, verdict.penalty) == (-2.0, None, 0.0)
    assert verdict.parts == {"a": -2.0, "truth": 1.0}
    without_truth = combine_parts(a=(part(), grade(1.0)), truth=(part(0.0), FAILED))
    assert (without_truth.reward, without_truth.parts) == (1.0, {"a": 1.0})


def test_a_part_without_correctness_leaves_the_decision_to_the_reward() -> None:
    verdict = combine_parts(a=(part(), grade(1.0)), model=(part(), judge(-3.0)))
    assert (verdict.reward, verdict.correctness) == (-1.0, None)


def test_a_closed_gate_gives_0() -> None:
    pass_verdict = combine_parts(gate=(part(gate=True), grade(0.5)), a=(part(), grade(0.75)))
    assert (pass_verdict.reward, pass_verdict.correctness) == (0.75, 0.75)
    stop_verdict = combine_parts(gate=(part(gate=True), grade(0.0)), a=(part(), grade(0.75)))
    assert (stop_verdict.reward, stop_verdict.correctness) == (0.0, 0.0)
    assert stop_verdict.parts == {"gate": 0.0, "a": 0.75}


def test_a_gate_cannot_raise_a_reward_below_0() -> None:
    verdict = combine_parts(gate=(part(gate=True), grade(0.0)), model=(part(), judge(-3.0)))
    assert verdict.reward is None
    assert verdict.reason == "beside a gate, part model has to give a correctness, from 0 to 1"


@pytest.mark.parametrize("settings", [part(), part(gate=True)])
def test_a_missing_part_is_no_zero(settings: PartSettings) -> None:
    verdict = combine_parts(a=(part(), grade(1.0)), b=(settings, FAILED))
    assert (verdict.reward, verdict.correctness) == (None, None)
    assert verdict.reason == "timeout (part b)"


def test_a_lost_process_of_a_part_is_still_counted_as_lost() -> None:
    no_process = Verdict(reward=None, correctness=None, reason=f"{LOST}: killed")
    verdict = combine_parts(a=(part(), no_process))
    assert count_unusable([group(verdict)]) == {PROCESS_LOST: 1}


def test_a_scorer_may_name_parts_of_its_own() -> None:
    style = Verdict(reward=1.0, correctness=1.0, parts={"style": 0.25})
    calls = FixedVerdict(style)
    prompt = Prompt(id="p", token_ids=(1,), answer="4", task="t")
    assert (
        asyncio.run(RewardRunner(calls).score(prompt, "4", FinishReason.STOP)).parts == style.parts
    )
    verdict = combine_parts(a=(part(), style))
    assert verdict.parts == {"a": 1.0, "a.style": 0.25}


@pytest.mark.parametrize(
    "parts", [{"style": float("nan")}, {str(number): 1.0 for number in range(65)}]
)
def test_parts_that_no_recording_can_hold_are_refused(parts: dict[str, float]) -> None:
    verdict = Verdict(reward=1.0, correctness=1.0, parts=parts)
    prompt = Prompt(id="p", token_ids=(1,), answer="4", task="t")
    runner = RewardRunner(FixedVerdict(verdict))
    result = asyncio.run(runner.score(prompt, "4", FinishReason.STOP))
    assert result.reward is None and "parts" in result.reason


def test_real_scorers_by_task() -> None:
    number = ScorerInThisProcess(ExactMatch("last_number"), timeout_s=5.0)
    text = ScorerInThisProcess(ExactMatch("last_line"), timeout_s=5.0)
    scorer = RewardRunner(
        ScorerOfParts(
            [
                Part("number", part(tasks=("sums",)), number),
                Part("text", part(tasks=("letters",)), text),
            ]
        )
    )
    for task, response, parts in [
        ("sums", "is 4", {"number": 1.0}),
        ("letters", "is 4", {"text": 0.0}),
        ("letters", "is\n4", {"text": 1.0}),
    ]:
        prompt = Prompt(id="p", token_ids=(1,), answer="4", task=task)
        verdict = asyncio.run(scorer.score(prompt, response, FinishReason.STOP))
        assert verdict.parts == parts


def test_answers_are_read_by_the_parts_of_the_task() -> None:
    reader = open_answer_reader(
        RewardSettings(
            name="parts",
            parts={
                "number": PartSettings(name="exact_match", tasks=["sums"]),
                "shown": PartSettings(name="exact_match", answer="last_line", weight=0.0),
            },
        )
    )
    assert reader(make_question("4")) == ("4", "4")
    with pytest.raises(ValueError, match=r"reward\.answer=last_number.*Paris"):
        reader(make_question("Paris"))
    with pytest.raises(ValueError, match=r"task 'letters', and no part of reward\.parts with a"):
        reader(make_question("4", task="letters"))
