"""Hostile answers: for each verifier they end within limits, and touch nothing else.

An answer beyond a rule is incorrect, each time. One beyond the clock or the memory has no verdict.
"""

from __future__ import annotations

import asyncio
import re
import resource
from pathlib import Path

import psutil
import pytest

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import open_scorer
from megatron_rl.rewards.verifiers.verifier import Verifier
from tests.support.hostile import choices, forms, gym_answers, json_values, mathematics
from tests.support.hostile.cases import HostileCases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MAX_SECONDS = 3.0  # of CPU time: the other load of a machine does not count
MAX_MEMORY_MIB = 1024
MIN_RESPONSES = 50
NO_VERDICT = ("TimeoutError", "MemoryError")


async def judge(verifier: Verifier, prompt: Prompt, text: str) -> float | str | None:
    """Return the reward, or the name of the error."""
    try:
        return (await verifier.score(prompt, text, FinishReason.STOP)).reward
    except (TimeoutError, MemoryError) as error:
        return type(error).__name__


def cpu_seconds() -> float:
    """Return the CPU time of the children that ended and of those that live."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = [child.cpu_times() for child in psutil.Process().children()]
    return usage.ru_utime + usage.ru_stime + sum(times.user + times.system for times in living)


def peak_mib() -> int:
    """Return the largest resident memory that a child has had beyond that of this process."""
    own = psutil.Process().memory_info().rss >> 20
    statuses = [Path(f"/proc/{child.pid}/status") for child in psutil.Process().children()]
    peaks = [re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) for status in statuses]
    return max((int(peak[1]) >> 10 for peak in peaks if peak is not None), default=own) - own


CASES = (mathematics.CASES, choices.CASES, json_values.CASES, forms.CASES)


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases.name)
def test_hostile_answers_end_within_limits_and_change_nothing(
    cases: HostileCases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    judge_all(cases)
    assert list(tmp_path.iterdir()) == []


def test_tasks_of_reasoning_gym_execute_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    cases = gym_answers.make_cases()
    monkeypatch.chdir(tmp_path)
    judge_all(cases)
    assert list(tmp_path.iterdir()) == []


def judge_all(cases: HostileCases) -> None:
    """Judge all responses twice. Print and check what they took."""
    assert len(set(cases.responses)) >= MIN_RESPONSES
    scorer = open_scorer(RewardSettings(name=cases.name, options=cases.options))
    assert isinstance(scorer, Verifier)

    async def ordinary_verdicts() -> list[float | str | None]:
        return [
            await judge(scorer, prompt, text) for prompt in cases.prompts for text in cases.ordinary
        ]

    async def run() -> tuple[list[float | str | None], float, int]:
        verdicts_before = await ordinary_verdicts()
        assert len(set(verdicts_before)) > 1
        slowest = peak = 0
        first = []
        for number, text in enumerate(cases.responses):
            for prompt in cases.prompts:
                start = cpu_seconds()
                first.append(await judge(scorer, prompt, text))
                slowest = max(slowest, cpu_seconds() - start)
                peak = max(peak, peak_mib())
            if number % 10 == 0:
                assert await ordinary_verdicts() == verdicts_before
        assert await ordinary_verdicts() == verdicts_before
        return first, slowest, peak

    verdicts, slowest, peak = asyncio.run(run())
    again, _, _ = asyncio.run(run())
    scorer.close()
    missing = sum(verdict in NO_VERDICT for verdict in verdicts)
    print(
        f"{cases.name}: {len(cases.responses)} hostile responses for {len(cases.prompts)} prompts, "
        f"at most {slowest:.2f} s of CPU time and {peak} MiB more; {missing} of "
        f"{len(verdicts)} calls without a verdict"
    )
    # A verdict is a rule's and repeats, or it is missing in both rounds
    assert verdicts == again
    assert all(verdict is not None for verdict in verdicts)
    assert slowest <= MAX_SECONDS
    assert peak <= MAX_MEMORY_MIB
