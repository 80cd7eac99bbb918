"""A scorer in several processes: who gets a call, and what a lost process costs."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_rl.config.schema import PartSettings, RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner
from megatron_rl.rollouts.user_process.user_classes import UserClasses
from megatron_rl.rollouts.wire.messages import FromCollector
from tests.rollouts.user_process.classes import PROMPT
from tests.support.fake_engine import configuration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROCESSES = 2
# The reward of a response is the number of the process that scored it.
SCORER = """
import asyncio
import os

from megatron_rl.contracts.group import Verdict


class Pid:
    def check_answer(self, question):
        pass

    async def score(self, prompt, text, finish_reason):
        await asyncio.sleep(float(text))
        return Verdict(reward=float(os.getpid()), correctness=1.0)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "several_processes.py").write_text(SCORER)
    monkeypatch.syspath_prepend(tmp_path)


@contextlib.asynccontextmanager
async def open_scorer(reward: RewardSettings) -> AsyncIterator[RewardRunner]:
    """A scorer as a collector opens it. None of its processes is left at the end."""

    async def report(message: FromCollector) -> None: ...

    earlier = set(psutil.Process().children(recursive=True))
    classes = UserClasses(msgspec.structs.replace(configuration(), reward=reward), report)
    try:
        yield RewardRunner(classes.scorer)
    finally:
        await classes.close()
    assert set(psutil.Process().children(recursive=True)) - earlier == set()


def two_processes() -> contextlib.AbstractAsyncContextManager[RewardRunner]:
    """A scorer in `PROCESSES` processes."""
    return open_scorer(
        RewardSettings(name="several_processes:Pid", timeout_s=30.0, processes=PROCESSES)
    )


async def score(runner: RewardRunner, seconds: float) -> int:
    """Score a response for so long. Returns the process."""
    verdict: Verdict = await runner.score(PROMPT, str(seconds), FinishReason.STOP)
    assert verdict.reward is not None, verdict.reason
    return int(verdict.reward)


def test_calls_at_the_same_time_are_divided_equally() -> None:
    async def run() -> list[int]:
        async with two_processes() as runner:
            return await asyncio.gather(*(score(runner, 0.5) for _ in range(8)))

    assert sorted(Counter(asyncio.run(run())).values()) == [4, 4]


def test_a_long_call_delays_no_other() -> None:
    """Calls go to the process that makes the fewest."""

    async def run() -> tuple[int, set[int]]:
        async with two_processes() as runner:
            long_call = asyncio.create_task(score(runner, 3.0))
            await asyncio.sleep(0)
            others = {await score(runner, 0.0) for _ in range(5)}
            assert not long_call.done()
            return await long_call, others

    slow, others = asyncio.run(run())
    assert len(others) == 1 and slow not in others


def test_a_lost_process_costs_no_verdict_and_not_the_other_process() -> None:
    async def run() -> tuple[set[int], set[int], int]:
        async with two_processes() as runner:
            before = set(await asyncio.gather(score(runner, 0.2), score(runner, 0.2)))
            calls = [asyncio.create_task(score(runner, 2.0)) for _ in range(4)]
            await asyncio.sleep(1.0)
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            return before, set(await asyncio.gather(*calls)), victim

    before, after, victim = asyncio.run(run())
    (kept,) = before - {victim}
    assert kept in after and victim not in after
    assert len(after) == PROCESSES


def test_parts_run_in_the_collector_and_in_processes_of_their_own() -> None:
    pid = PartSettings(name="several_processes:Pid", weight=0.0)
    parts = {"match": PartSettings(name="exact_match"), "pid": pid, "other": pid}

    async def run() -> Verdict:
        async with open_scorer(RewardSettings(name="parts", parts=parts)) as runner:
            return await runner.score(PROMPT, "0.5", FinishReason.STOP)

    verdict = asyncio.run(run())
    assert (verdict.reward, verdict.correctness) == (verdict.parts["match"], verdict.parts["match"])
    assert len({verdict.parts["pid"], verdict.parts["other"], float(os.getpid())}) == 3
