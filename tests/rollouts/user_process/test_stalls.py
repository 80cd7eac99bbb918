"""A process of a class that stops, is killed or blocked: which calls are made again, and which not.

No stall takes a verdict from a call that is not its reason, and none ends the run.
"""

import asyncio
import signal
from pathlib import Path

import pytest

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner
from megatron_rl.rewards.runner import LOST
from megatron_rl.rollouts.user_process.user_classes import ScorerInProcess
from tests.rollouts.user_process.classes import (
    PROMPT,
    open_class,
    score_in_process,
    signal_process_of,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NAME = "stalling:Stalling"
TIMEOUT_SECONDS = 3.0
GRACE_SECONDS = 1.0
# The limit of silence is 5 seconds: the timeout, the grace and two heartbeats.
SHORT_STALL_SECONDS = 3.5
LONG_STALL_SECONDS = 8.0
CLASS = """
import asyncio
import contextlib
import os
import resource
import threading
import time

from megatron_rl.contracts.group import Verdict
from megatron_rl.rewards import Scorer


class NeverStays(Scorer):
    def __init__(self):
        threading.Timer(0.3, os._exit, [7]).start()

    async def score(self, prompt, text, finish_reason):
        await asyncio.sleep(60)


class Stalling(Scorer):
    def __init__(self, gigabytes=0):
        if gigabytes:
            num_bytes = int(gigabytes * 10**9)
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))

    async def allocates(self):
        await asyncio.sleep(0.1)
        blocks = []
        while True:
            blocks.append(bytearray(2**24))

    async def priority(self):
        assert open("/proc/self/oom_score_adj").read() == "1000\\n"

    async def score(self, prompt, text, finish_reason):
        word, *rest = text.split()
        with open("FOLDER/calls", "a") as file:
            file.write(f"{os.getpid()} {text}\\n")
        await getattr(self, word)()
        return Verdict(reward=1.0, correctness=1.0)

    async def after(self):
        pass

    async def sleeps(self):
        await asyncio.sleep(1.5)

    async def works(self):
        for _ in range(300):
            time.sleep(0.005)
            await asyncio.sleep(0)

    async def blocks(self):
        await asyncio.sleep(0.1)
        time.sleep(3600)

    async def blocks_once(self):
        await asyncio.sleep(0.1)
        if not os.path.exists("FOLDER/blocked"):
            open("FOLDER/blocked", "w").close()
            time.sleep(60)

    async def waits_in_vain(self):
        await asyncio.sleep(3600)

    async def swallows(self):
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)

    async def notes_its_cancellation(self):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            open("FOLDER/cancelled", "w").close()
            raise
"""


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file with a line for each call that was made: a process id and the text."""
    (tmp_path / "stalling.py").write_text(CLASS.replace("FOLDER", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "calls"


def processes_by_call(file: Path) -> dict[str, list[str]]:
    """Return the processes in which each call was made, as letters in the order of their start."""
    letters: dict[str, str] = {}
    processes: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        pid, text = line.split(" ", 1)
        letter = letters.setdefault(pid, "abcdefgh"[len(letters)])
        processes.setdefault(text, []).append(letter)
    return processes


def rewards_of(verdicts: dict[str, Verdict]) -> set[float | None]:
    return {verdict.reward for verdict in verdicts.values()}


@pytest.mark.parametrize("word", [pytest.param("sleeps", marks=pytest.mark.nightly), "works"])
def test_a_stall_within_the_limit_costs_nothing(word: str, calls: Path) -> None:
    """The time of a call stands still meanwhile."""
    texts = [f"{word} {number}" for number in range(4)]
    act = signal_process_of(calls, signal.SIGSTOP, stopped_s=SHORT_STALL_SECONDS)
    seconds = 20.0 if word == "works" else TIMEOUT_SECONDS
    results = score_in_process(
        NAME, *texts, timeout_s=seconds, grace_s=GRACE_SECONDS, act=act, then=()
    )
    assert rewards_of(results.verdicts) == {1.0}
    assert results.seconds > SHORT_STALL_SECONDS and results.warnings == []
    assert set(map(tuple, processes_by_call(calls).values())) == {("a",)}


def test_a_stall_beyond_the_limit_ends_the_process_and_all_calls_are_made_again(
    calls: Path,
) -> None:
    """More calls than any limit of ends was: the stall is one end, and nobody's fault."""
    texts = [f"sleeps {number}" for number in range(110)]
    act = signal_process_of(calls, signal.SIGSTOP, stopped_s=LONG_STALL_SECONDS)
    results = score_in_process(
        NAME, *texts, timeout_s=TIMEOUT_SECONDS, grace_s=GRACE_SECONDS, act=act, then=()
    )
    assert rewards_of(results.verdicts) == {1.0}
    (warning,) = results.warnings
    assert "it answered nothing for 5 s; its process was killed" in warning
    assert "(no call ran code; number 1)" in warning
    assert set(map(tuple, processes_by_call(calls).values())) == {("a", "b")}


def test_a_kill_makes_all_calls_again(calls: Path) -> None:
    act = signal_process_of(calls, signal.SIGKILL)
    texts = [f"sleeps {number}" for number in range(20)]
    results = score_in_process(NAME, *texts, timeout_s=8.0, grace_s=GRACE_SECONDS, act=act)
    assert rewards_of(results.verdicts) == {1.0}
    assert "SIGKILL" in results.warnings[0] and len(results.warnings) == 1


@pytest.mark.nightly
def test_calls_that_lose_a_second_process_have_no_verdict(calls: Path) -> None:
    act = signal_process_of(calls, signal.SIGKILL, times=2)
    texts = ("waits_in_vain 1", "waits_in_vain 2")
    results = score_in_process(NAME, *texts, timeout_s=30.0, grace_s=GRACE_SECONDS, act=act)
    for text in texts:
        assert results.reason(text).startswith(LOST) and "SIGKILL" in results.reason(text)
    assert results.verdicts["after"].reward == 1.0
    assert processes_by_call(calls) == {
        "waits_in_vain 1": ["a", "b"],
        "waits_in_vain 2": ["a", "b"],
        "after": ["c"],
    }


@pytest.mark.nightly
def test_a_class_whose_process_never_stays_loses_its_calls_and_nothing_waits() -> None:
    results = score_in_process("stalling:NeverStays", "a", "b", timeout_s=30.0, then=())
    for text in ("a", "b"):
        assert results.reason(text).startswith(LOST)


@pytest.mark.nightly
def test_a_call_that_blocks_costs_none_of_many_others(calls: Path) -> None:
    """The others have verdicts in the second process. The bad one is made again alone."""
    good = [f"sleeps {number}" for number in range(50)]
    results = score_in_process(
        NAME, "blocks", *good, timeout_s=TIMEOUT_SECONDS, grace_s=GRACE_SECONDS
    )
    assert results.reason("blocks").startswith("ChildProcessError: ")
    assert "it answered nothing for 5 s" in results.reason("blocks")
    processes = processes_by_call(calls)
    assert rewards_of({text: results.verdicts[text] for text in good}) == {1.0}
    assert len(processes["blocks"]) == 2
    assert {tuple(processes[text]) for text in good} in ({("a", "b")}, {("a", "c")})
    assert set(processes["blocks"]) & set(processes["sleeps 0"]) == {"a"}
    assert "(call 'blocks'; number 1)" in results.warnings[0]


@pytest.mark.nightly
def test_several_calls_that_block_cost_none_of_the_others(calls: Path) -> None:
    bad = ("blocks 1", "blocks 2", "blocks 3")
    good = [f"sleeps {number}" for number in range(10)]
    results = score_in_process(NAME, *bad, *good, timeout_s=1.0 + 1.0, grace_s=0.5)
    assert {results.verdicts[text].reward for text in bad} == {None}
    assert {results.verdicts[text].reward for text in good} == {1.0}


@pytest.mark.nightly
def test_a_call_that_blocks_once_has_its_verdict(calls: Path) -> None:
    """A stall while the code of a call runs looks the same."""
    texts = ("blocks_once", "sleeps 1", "sleeps 2")
    results = score_in_process(NAME, *texts, timeout_s=TIMEOUT_SECONDS, grace_s=GRACE_SECONDS)
    assert rewards_of(results.verdicts) == {1.0}


def test_a_call_that_ignores_its_cancellation_costs_itself_alone(calls: Path) -> None:
    """Its process is replaced once it has nothing else to do."""
    results = score_in_process(
        NAME, "swallows", "works", timeout_s=4.0, grace_s=GRACE_SECONDS, then=("after 1", "after 2")
    )
    assert results.reason("swallows") == "timeout: the scorer ignored its cancellation"
    assert results.verdicts["works"].reward == results.verdicts["after 2"].reward == 1.0
    assert "ignored its cancellation for 1 s; its process is replaced when" in results.warnings[0]
    assert processes_by_call(calls) == {
        "swallows": ["a"],
        "works": ["a"],
        "after 1": ["b"],
        "after 2": ["b"],
    }


def test_a_call_whose_caller_is_cancelled_is_cancelled(calls: Path) -> None:
    """Nobody makes it again, and a neighbour goes on."""

    async def report(text: str) -> None:
        pass

    async def run() -> Verdict:
        settings = RewardSettings(name=NAME, timeout_s=30.0)
        remote_class = open_class(settings, report, grace_s=GRACE_SECONDS)
        runner = RewardRunner(ScorerInProcess(remote_class))

        def score(text: str) -> asyncio.Task[Verdict]:
            return asyncio.create_task(runner.score(PROMPT, text, FinishReason.STOP))

        try:
            task, other, stubborn = map(score, ("notes_its_cancellation", "sleeps", "swallows"))
            while not calls.exists() or len(calls.read_text().splitlines()) < 3:
                await asyncio.sleep(0.02)
            for cancelled in (task, stubborn):
                cancelled.cancel()
            assert await asyncio.to_thread(wait_for, (calls.parent / "cancelled").exists)
            assert (await other).reward == 1.0
            await asyncio.sleep(GRACE_SECONDS + 1.0)  # the stubborn one is found out
            return await score("after")
        finally:
            await remote_class.close()

    assert asyncio.run(run()).reward == 1.0
    assert processes_by_call(calls)["notes_its_cancellation"] == ["a"]
    assert processes_by_call(calls)["after"] == ["b"]


def test_memory_is_limited_by_the_class_or_the_kernel(calls: Path) -> None:
    """The process is its own: the constructor may set a limit, and the kernel chooses it first."""
    results = score_in_process(
        NAME, "allocates", "sleeps", timeout_s=30.0, options={"gigabytes": 0.5}, then=("priority",)
    )
    assert "in allocates: MemoryError" in results.reason("allocates")
    assert results.verdicts["sleeps"].reward == 1.0
    assert results.verdicts["priority"].reward == 1.0 and results.warnings == []
    assert set(map(tuple, processes_by_call(calls).values())) == {("a",)}
