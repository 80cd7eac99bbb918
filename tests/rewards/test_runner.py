import asyncio
import time
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner

PROMPT = Prompt(id="p", token_ids=(1,), answer="1", task="t")


class Scripted:
    """Does with each response what the response's text says."""

    CARELESS = MappingProxyType(
        {
            "number": 1.0,
            "nothing": None,
            "text": Verdict(reward="1", correctness=1.0),
            "truth": Verdict(reward=1.0, correctness=True),
            "answer": Verdict(reward=1.0, correctness=1.0, answer=5),
            "numpy": Verdict(reward=np.float32(1), correctness=1.0),
        }
    )

    def __init__(self) -> None:
        self.cancelled = 0

    def check_answer(self, answer: str) -> None:
        pass

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        try:
            match text.split():
                case ["reward", value]:
                    return Verdict(reward=float(value), correctness=float(value))
                case ["judged", value]:
                    return Verdict(reward=float(value), correctness=None)
                case ["sleep", seconds]:
                    await asyncio.sleep(float(seconds))
                    return Verdict(reward=1.0, correctness=1.0)
                case ["none", reason]:
                    return Verdict(reward=None, correctness=None, reason=reason)
                case ["own_timeout"]:
                    raise TimeoutError("the grader's own")
                case ["own_cancel"]:
                    raise asyncio.CancelledError
                case ["half_a_character", value]:
                    return Verdict(
                        reward=float(value),
                        correctness=1.0,
                        answer="\ud800" * 10**6,
                        reason="\ud800",
                    )
                case ["raise_half_a_character"]:
                    raise ValueError("\ud800")
                case ["careless", name]:
                    return self.CARELESS[name]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise RuntimeError("broken " + "x" * 1000)


def judge(*texts: str, timeout_s: float = 0.2) -> tuple[list[Verdict], Scripted]:
    scorer = Scripted()
    runner = RewardRunner(scorer, timeout_s=timeout_s)

    async def run() -> list[Verdict]:
        return await asyncio.gather(
            *(runner.judge(PROMPT, text, FinishReason.STOP) for text in texts)
        )

    return asyncio.run(run()), scorer


def test_failures_and_timeouts_give_no_verdict_and_harm_no_other() -> None:
    verdicts, scorer = judge("reward 1", "sleep 30", "explode", "none judge_down", "own_timeout")
    right, slow, broken, none, own = verdicts
    assert (right.reward, right.correctness, right.reason) == (1.0, 1.0, "")
    assert (slow.reward, slow.correctness, slow.reason) == (None, None, "timeout")
    assert broken.reward is None
    assert ", in score: RuntimeError: broken xxx" in broken.reason
    assert len(broken.reason) == 200
    assert (none.reward, none.reason) == (None, "judge_down")
    assert (own.reward, own.reason) == (None, own.reason)
    assert own.reason.endswith(", in score: TimeoutError: the grader's own")
    assert scorer.cancelled == 1


def test_a_judges_reward_needs_no_correctness_and_must_be_finite() -> None:
    judged, lost = judge("judged 0.25", "judged nan")[0]
    assert (judged.reward, judged.correctness, judged.reason) == (0.25, None, "")
    assert lost.reward is None and "not finite" in lost.reason


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_is_no_verdict(value: str) -> None:
    (verdict,), _ = judge(f"reward {value}")
    assert (verdict.reward, verdict.correctness) == (None, None)
    assert "not finite" in verdict.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("number", "TypeError: the scorer returned float, not a Verdict"),
        ("nothing", "TypeError: the scorer returned NoneType, not a Verdict"),
        ("text", "ValidationError: Expected `float | null`, got `str` - at `$.reward`"),
        ("truth", "ValidationError: Expected `float | null`, got `bool` - at `$.correctness`"),
        ("answer", "ValidationError: Expected `str | null`, got `int` - at `$.answer`"),
        ("numpy", "ValidationError: Expected `float | null`, got `numpy.float32` - at `$.reward`"),
    ],
)
def test_what_is_no_verdict_is_counted_with_its_reason(name: str, reason: str) -> None:
    (verdict,), _ = judge(f"careless {name}")
    assert (verdict.reward, verdict.correctness, verdict.reason) == (None, None, reason)


def test_scoring_overlaps_and_is_timed() -> None:
    start = time.perf_counter()
    verdicts, _ = judge(*["sleep 0.1"] * 50, timeout_s=5)
    assert time.perf_counter() - start < 2.5, "fifty times 0.1 s one after another would take 5 s"
    assert all(0.09 < v.seconds < 2.5 and v.reward == 1.0 for v in verdicts)


def test_a_scorer_that_cancels_itself_gives_no_verdict() -> None:
    (verdict,), _ = judge("own_cancel")
    assert (verdict.reward, verdict.reason) == (None, "the scorer cancelled itself")


def test_a_cancelled_caller_cancels_its_scorer() -> None:
    scorer = Scripted()
    runner = RewardRunner(scorer, timeout_s=10)

    async def run() -> None:
        task = asyncio.create_task(runner.judge(PROMPT, "sleep 30", FinishReason.STOP))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert scorer.cancelled == 1


@pytest.mark.parametrize(
    "text", ["half_a_character 1", "half_a_character nan", "raise_half_a_character"]
)
def test_whatever_a_scorer_writes_a_verdict_can_be_sent(text: str) -> None:
    """A verdict that cannot be encoded would leave rank 0 waiting for its group."""
    (verdict,), _ = judge(text)
    assert len(msgspec.msgpack.encode(verdict)) < 2000
    assert (verdict.reward == 1.0) == text.endswith("1")


@pytest.mark.parametrize("value", ["1e300", "-2e6"])
def test_an_absurd_reward_is_no_verdict(value: str) -> None:
    (verdict,), _ = judge(f"reward {value}")
    assert (
        verdict.reward is None
        and verdict.reason
        == f"reward {float(value):g} or correctness {float(value):g} is beyond 1e+06"
    )


def test_why_a_scorer_failed_begins_with_its_line() -> None:
    (verdict,), _ = judge("explode")
    assert (
        verdict.reason.startswith("test_runner.py:")
        and ", in score: RuntimeError: broken" in verdict.reason
    )
