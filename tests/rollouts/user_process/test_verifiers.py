"""Verifiers run in processes of their own, which make one call at a time."""

import asyncio
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner
from megatron_rl.rollouts.user_process.user_classes import ScorerInProcess, UserClasses
from megatron_rl.rollouts.wire.messages import FromCollector
from tests.rollouts.user_process.classes import PROMPT, open_class
from tests.support.fake_engine import configuration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SLEEPER = """
import asyncio

from megatron_rl.contracts.group import Verdict


class Sleeper:
    def check_answer(self, question):
        pass

    async def score(self, prompt, text, finish_reason):
        await asyncio.sleep(float(text))
        return Verdict(reward=1.0, correctness=1.0)
"""


async def ignore(message: FromCollector | str) -> None: ...


def test_verifier_scores_in_several_processes_and_leaves_none() -> None:
    reward = RewardSettings(name="math", processes=2)
    earlier = set(psutil.Process().children(recursive=True))

    async def run() -> list[float | None]:
        classes = UserClasses(msgspec.structs.replace(configuration(), reward=reward), ignore)
        runner = RewardRunner(classes.scorer)

        async def score(number: int) -> float | None:
            prompt = Prompt(id="p", token_ids=(1,), answer=rf"\frac{{{number}}}{{8}}", task="t")
            text = rf"\boxed{{{number // 2 / 4}}}"
            verdict = await runner.score(prompt, text, FinishReason.STOP)
            assert not verdict.reason
            return verdict.reward

        try:
            return await asyncio.gather(*(score(number) for number in range(40)))
        finally:
            await classes.close()

    assert asyncio.run(run()) == [1.0, 0.0] * 20
    assert set(psutil.Process().children(recursive=True)) - earlier == set()


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_time_of_a_call_begins_when_a_process_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_at_a_time: bool
) -> None:
    (tmp_path / "sleeping_scorer.py").write_text(SLEEPER)
    monkeypatch.syspath_prepend(tmp_path)
    settings = RewardSettings(name="sleeping_scorer:Sleeper", timeout_s=1.5)

    async def run() -> float:
        classes = [open_class(settings, ignore) for _ in range(2)]
        scorer = ScorerInProcess(*classes, one_at_a_time=one_at_a_time)
        runner = RewardRunner(scorer)
        start = time.monotonic()
        calls = (runner.score(PROMPT, "0.5", FinishReason.STOP) for _ in range(8))
        verdicts = await asyncio.gather(*calls)
        seconds = time.monotonic() - start
        await asyncio.gather(*(remote.close() for remote in classes))
        assert [verdict.reward for verdict in verdicts] == [1.0] * 8
        return seconds

    seconds = asyncio.run(run())
    assert (seconds >= 2.0) == one_at_a_time  # longer than the limit of one call
