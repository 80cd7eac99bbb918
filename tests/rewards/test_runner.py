"""The reward runner: failing, slow and invalid scorers give no reward, with a reason."""

import asyncio
import math
import random
import time
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner, ScorerInThisProcess

PROMPT = Prompt(id="p", token_ids=(1,), answer="1", task="t")


def sum_in_order(parts: list[str]) -> float:
    """The sum of numbers, rounded after each term."""
    total = 0.0
    for part in parts:
        total += float(part)
    return total


def verdict_of(kind: str, value: float) -> Verdict:
    """A verdict whose reward, correctness or both are `value`."""
    if kind == "correctness":
        return Verdict(reward=0.0, correctness=value)
    return Verdict(reward=value, correctness=None if kind == "reward_model" else value)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class ScriptedScorer:
    """Does what the text of each response says."""

    INVALID_RESULTS = MappingProxyType(
        {
            "number": 1.0,
            "nothing": None,
            "text": Verdict(reward="1", correctness=1.0),
            "truth": Verdict(reward=1.0, correctness=True),
            "answer": Verdict(reward=1.0, correctness=1.0, answer=5),
            "numpy": Verdict(reward=np.float32(1), correctness=1.0),
            "negative_penalty": Verdict(reward=1.0, correctness=1.0, penalty=-0.5),
            "large_penalty": Verdict(reward=1.0, correctness=1.0, penalty=2.0),
            "nan_penalty": Verdict(reward=1.0, correctness=1.0, penalty=math.nan),
        }
    )

    def __init__(self) -> None:
        self.cancellations = 0

    def check_answer(self, question: Question) -> None:
        pass

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        try:
            match text.split():
                case ["share", *parts]:
                    share = sum_in_order(parts)
                    return Verdict(reward=share, correctness=share)
                case ["reward" | "correctness" | "reward_model" as kind, value]:
                    return verdict_of(kind, float(value))
                case ["sleep", seconds]:
                    await asyncio.sleep(float(seconds))
                    return Verdict(reward=1.0, correctness=1.0)
                case ["none", reason]:
                    return Verdict(reward=None, correctness=None, reason=reason)
                case ["raise_timeout"]:
                    raise TimeoutError("the grader is slow")
                case ["raise_unprintable"]:
                    raise Unprintable
                case ["cancel"]:
                    raise asyncio.CancelledError
                case ["surrogate", value]:
                    return Verdict(
                        reward=float(value),
                        correctness=1.0,
                        answer="\ud800" * 10**6,
                        reason="\ud800",
                    )
                case ["raise_surrogate"]:
                    raise ValueError("\ud800")
                case ["invalid", name]:
                    return self.INVALID_RESULTS[name]
        except asyncio.CancelledError:
            self.cancellations += 1
            raise
        raise RuntimeError("defect " + "x" * 1000)


def open_runner(scorer: ScriptedScorer, timeout_s: float) -> RewardRunner:
    return RewardRunner(ScorerInThisProcess(scorer, timeout_s=timeout_s))


def score(*texts: str, timeout_s: float = 0.2) -> tuple[list[Verdict], ScriptedScorer]:
    scorer = ScriptedScorer()
    runner = open_runner(scorer, timeout_s=timeout_s)

    async def run() -> list[Verdict]:
        return await asyncio.gather(
            *(runner.score(PROMPT, text, FinishReason.STOP) for text in texts)
        )

    return asyncio.run(run()), scorer


def test_failures_and_timeouts_give_no_reward_and_affect_no_other() -> None:
    verdicts, scorer = score("reward 1", "sleep 30", "explode", "none server_down", "raise_timeout")
    correct, slow, failing, none, raising = verdicts
    assert (correct.reward, correct.correctness, correct.reason) == (1.0, 1.0, "")
    assert (slow.reward, slow.correctness, slow.reason) == (None, None, "timeout")
    assert failing.reward is None
    assert ", in score: RuntimeError: defect xxx" in failing.reason
    assert len(failing.reason) == 200
    assert (none.reward, none.reason) == (None, "server_down")
    assert raising.reward is None
    assert raising.reason.endswith(", in score: TimeoutError: the grader is slow")
    assert scorer.cancellations == 1


def test_an_exception_without_a_readable_message_gives_no_reward() -> None:
    (verdict,), _ = score("raise_unprintable")
    assert verdict.reason.endswith(", in score: Unprintable: (its message cannot be read)")


def test_reward_without_correctness_must_be_finite() -> None:
    finite, nan = score("reward_model 0.25", "reward_model nan")[0]
    assert (finite.reward, finite.correctness, finite.reason) == (0.25, None, "")
    assert nan.reward is None
    assert "not finite" in nan.reason


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_non_finite_reward_counts_as_none(value: str) -> None:
    (verdict,), _ = score(f"reward {value}")
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
        ("negative_penalty", "ValidationError: Expected `float` >= 0.0 - at `$.penalty`"),
        ("large_penalty", "ValidationError: Expected `float` <= 1.0 - at `$.penalty`"),
        ("nan_penalty", "ValidationError: Expected `float` >= 0.0 - at `$.penalty`"),
    ],
)
def test_invalid_results_give_no_reward_with_a_reason(name: str, reason: str) -> None:
    (verdict,), _ = score(f"invalid {name}")
    assert (verdict.reward, verdict.correctness, verdict.reason) == (None, None, reason)


def test_scoring_is_concurrent_and_timed() -> None:
    start = time.perf_counter()
    verdicts, _ = score(*["sleep 0.5"] * 50, timeout_s=20)
    assert time.perf_counter() - start < 12, "50 calls of 0.5 s would take 25 s one after another"
    assert all(0.49 < v.seconds < 12 and v.reward == 1.0 for v in verdicts)


def test_scorer_that_cancels_itself_gives_no_reward() -> None:
    (verdict,), _ = score("cancel")
    assert (verdict.reward, verdict.reason) == (None, "the scorer cancelled itself")


def test_cancelling_a_call_cancels_its_scorer() -> None:
    scorer = ScriptedScorer()
    runner = open_runner(scorer, timeout_s=10)

    async def run() -> None:
        task = asyncio.create_task(runner.score(PROMPT, "sleep 30", FinishReason.STOP))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert scorer.cancellations == 1


@pytest.mark.parametrize("text", ["surrogate 1", "surrogate nan", "raise_surrogate"])
def test_every_verdict_can_be_encoded(text: str) -> None:
    """Otherwise rank 0 would wait for the group forever."""
    (verdict,), _ = score(text)
    assert len(msgspec.msgpack.encode(verdict)) < 2000
    assert (verdict.reward == 1.0) == text.endswith("1")


@pytest.mark.parametrize("value", ["1e300", "-2e6"])
def test_too_large_reward_counts_as_none(value: str) -> None:
    (verdict,), _ = score(f"reward_model {value}")
    assert verdict.reward is None
    assert verdict.reason == f"reward {float(value):g} is beyond 1e+06"


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ([0.1, 0.2, 0.3, 0.4], 1.0),
        ([0.1] * 10, 1.0),
        ([1 / 3] * 3, 1.0),
        ([1 / 7] * 7, 1.0),
        ([1 / 49] * 49, 1.0),
        ([0.7, 0.1, 0.2], 1.0),
        ([0.15, 0.25, 0.35], 0.75),
        ([0.1, 0.2, 0.3], 0.6),
        ([0.0015625, 0.003125, 0.0078125, 0.05], 0.062500),  # 640 tests: a tie at six decimals
        ([0.3, -0.1, -0.2], 0.0),
        ([1.1, -0.1], 1.0),
        ([0.9999999403953552], 1.0),  # a sum of float32
    ],
)
def test_sums_of_parts_in_any_order_are_one_score(parts: list[float], total: float) -> None:
    orders = [random.Random(seed).sample(parts, len(parts)) for seed in range(24)]
    verdicts, _ = score(*(f"share {' '.join(map(repr, order))}" for order in orders))
    scores = {(verdict.reward, verdict.correctness) for verdict in verdicts}
    assert scores == {(total, total)}
    assert math.copysign(1.0, verdicts[0].correctness or 0.0) == 1.0


@pytest.mark.parametrize("value", ["-1", "1.01", "100", "-0.00001"])
def test_correctness_outside_0_to_1_gives_no_reward(value: str) -> None:
    (verdict,), _ = score(f"correctness {value}")
    assert (verdict.reward, verdict.correctness) == (None, None)
    assert verdict.reason == (
        f"correctness {float(value):g} is not from 0 to 1. Return it as reward with "
        "correctness=None, or rescale it"
    )


def test_reason_of_a_failure_begins_with_the_scorers_line() -> None:
    (verdict,), _ = score("explode")
    assert verdict.reason.startswith("test_runner.py:")
    assert ", in score: RuntimeError: defect" in verdict.reason
