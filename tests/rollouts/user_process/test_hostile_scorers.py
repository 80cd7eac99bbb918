"""Scorers that block, fork, eat memory or end their process cost their own call, not the run."""

from pathlib import Path

import pytest

from megatron_rl.rewards.runner import ABANDONED
from megatron_rl.rollouts.user_process.remote_class import TooManyAbandoned
from tests.rollouts.user_process.classes import (
    GIGABYTE,
    Results,
    is_running,
    pids_in,
    score_in_process,
)

pytestmark = pytest.mark.timeout(90)
GRACE_SECONDS = 0.3
# From a cancellation to the verdict, with a new process, on a machine that does other things too
SECONDS = 20.0

SCORER = """
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

from megatron_rl.contracts.group import Verdict

GOOD = Verdict(reward=1.0, correctness=1.0)
IGNORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


def note(pid):
    with open("FOLDER/pids", "a") as file:
        file.write(f"{pid}\\n")


class Hostile:
    def check_answer(self, answer):
        pass

    async def score(self, prompt, text, finish_reason):
        note(os.getpid())
        return await getattr(self, text.split()[0])()

    async def after(self):
        return GOOD

    async def waits(self):
        await asyncio.sleep(0.3)
        return GOOD

    async def swallows(self):
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                pass

    async def blocks(self):
        await asyncio.sleep(0.05)
        while True:
            pass

    async def blocks_in_a_task(self):
        await asyncio.create_task(self.blocks())

    async def allocates(self):
        await asyncio.sleep(0.05)
        blocks = []
        while True:
            blocks.append(bytearray(2**24))

    async def allocates_elsewhere(self):
        code = "blocks = []\\nwhile True: blocks.append(bytearray(2**24))"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        await process.wait()
        return GOOD

    async def forks(self):
        for is_session in (False, True):
            child = subprocess.Popen([sys.executable, "-c", IGNORE], start_new_session=is_session)
            note(child.pid)
        if os.fork() == 0:  # a daemon: its parent is gone
            note(os.getpid())
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork():
                os._exit(0)
            note(os.getpid())
            signal.pause()
        await self.swallows()

    async def forks_without_end(self):
        while True:
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.alarm(60)  # for a test that fails
                signal.pause()
            time.sleep(0.005)

    async def forks_and_returns(self):
        if os.fork():
            await asyncio.sleep(0.3)
        return GOOD

    async def exits(self):
        await asyncio.sleep(0.05)
        os._exit(3)

    async def exits_in_a_thread(self):
        threading.Timer(0.1, os._exit, [4]).start()
        await asyncio.sleep(3600)

    async def raises_system_exit(self):
        raise SystemExit(3)

    async def raises_interrupt(self):
        raise KeyboardInterrupt

    async def prints(self):
        for _ in range(200):
            print("x" * 100_000)
        return GOOD

    async def closes(self):
        await asyncio.sleep(0.05)
        os.closerange(3, 4096)
        await asyncio.sleep(3600)

    async def writes(self):
        await asyncio.sleep(0.05)
        for descriptor in range(3, 64):
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket"):
                    os.write(descriptor, b"\\xff" * 4096)
            except OSError:
                pass
        await asyncio.sleep(3600)

    async def stops(self):
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGSTOP)

    async def kills_its_supervisor(self):
        await asyncio.sleep(0.05)
        os.kill(os.getppid(), signal.SIGKILL)
        await asyncio.sleep(3600)

    async def returns_an_object(self):
        return object()

    async def returns_a_lie(self):
        return Verdict(reward="1", correctness=[], reason=5)
"""


@pytest.fixture(autouse=True)
def hostile_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file that lists the processes of the class and those that it starts."""
    (tmp_path / "hostile.py").write_text(SCORER.replace("FOLDER", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        "megatron_rl.rollouts.user_process.remote_class._GRACE_SECONDS", GRACE_SECONDS
    )
    return tmp_path / "pids"


def score(*texts: str, **options: object) -> Results:
    return score_in_process("hostile:Hostile", *texts, **options)  # type: ignore[arg-type]


def processes_of(file: Path) -> int:
    """Return how many processes have run calls or were started. None is left."""
    pids = set(pids_in(file))
    assert [pid for pid in pids if is_running(pid)] == []
    return len(pids)


@pytest.mark.parametrize("text", ["swallows", "blocks", "blocks_in_a_task", "stops"])
def test_a_call_that_ignores_its_cancellation_is_killed_and_others_are_made_again(
    text: str, hostile_module: Path
) -> None:
    results = score(text, "waits")
    assert results.reason(text) == ABANDONED
    assert results.verdicts["waits"].reward == 1.0 and results.verdicts["after"].reward == 1.0
    assert 0.5 + GRACE_SECONDS <= results.seconds < SECONDS
    (warning,) = results.warnings
    assert "a call ignored its cancellation for 0.3 s; its process was killed and is" in warning
    assert f"(call {text!r}; number 1)" in warning
    assert processes_of(hostile_module) == 2


def test_calls_that_ignore_their_cancellation_together_are_killed_together() -> None:
    results = score("swallows 1", "swallows 2", "waits", "swallows 3")
    assert {results.reason(f"swallows {number}") for number in (1, 2, 3)} == {ABANDONED}
    assert results.verdicts["waits"].reward == 1.0
    assert [text[-9:] for text in results.warnings] == ["number 1)", "number 2)"]
    assert results.seconds < SECONDS


def test_a_scorer_that_allocates_without_end_is_killed(hostile_module: Path) -> None:
    results = score("allocates", "waits", memory=GIGABYTE // 2, timeout_s=30.0)
    assert "it used " in results.reason("allocates")
    assert "more than rollout.user_memory_gb=0.5" in results.reason("allocates")
    assert results.verdicts["waits"].reward == 1.0 and results.verdicts["after"].reward == 1.0
    assert results.seconds < SECONDS
    assert "allocates" in results.warnings[0] and processes_of(hostile_module) == 2


def test_memory_of_a_process_that_a_scorer_starts_counts(hostile_module: Path) -> None:
    results = score("allocates_elsewhere", memory=GIGABYTE // 2, timeout_s=30.0)
    assert "with the processes it started" in results.reason("allocates_elsewhere")
    assert results.seconds < SECONDS


def test_no_forked_process_is_left_even_if_it_ignores_sigterm(hostile_module: Path) -> None:
    results = score("forks")
    assert results.reason("forks") == ABANDONED
    assert results.verdicts["after"].reward == 1.0
    # Two processes of the class, two children, and a daemon with its parent
    assert processes_of(hostile_module) == 6


def test_a_fork_that_returns_into_the_event_loop_ends() -> None:
    results = score("forks_and_returns", timeout_s=10.0)
    assert results.verdicts["forks_and_returns"].reward == 1.0
    assert results.warnings == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exits", "exit code 3"),
        ("exits_in_a_thread", "exit code 4"),
        ("closes", "it closed its connection"),
        ("writes", "it sent an invalid message"),
        ("kills_its_supervisor", "SIGKILL"),
    ],
)
def test_a_process_that_ends_costs_the_call_that_ended_it(
    text: str, reason: str, hostile_module: Path
) -> None:
    results = score(text, "after", timeout_s=10.0, then=("waits",))
    assert reason in results.reason(text)
    assert results.reason(text).startswith("UserProcessEnded: reward.name=hostile:Hostile: its ")
    assert results.verdicts["after"].reward == 1.0 and results.verdicts["waits"].reward == 1.0
    assert processes_of(hostile_module) == 2


def test_exits_of_the_interpreter_cost_a_call_and_not_the_process(hostile_module: Path) -> None:
    texts = ("raises_system_exit", "raises_interrupt")
    results = score(*texts, "returns_an_object", "returns_a_lie", "waits", timeout_s=10.0)
    assert results.reason("raises_system_exit").endswith("SystemExitCalled: sys.exit(3)")
    assert "KeyboardInterrupt" in results.reason("raises_interrupt")
    assert "returned object, not a Verdict" in results.reason("returns_an_object")
    assert "Expected `float | null`, got `str`" in results.reason("returns_a_lie")
    assert results.verdicts["waits"].reward == 1.0
    assert results.warnings == [] and processes_of(hostile_module) == 1


def test_what_a_scorer_prints_comes_out_and_blocks_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    results = score("prints", "waits", timeout_s=30.0)
    assert results.verdicts["prints"].reward == 1.0
    assert capfd.readouterr().out.count("x" * 100_000) == 200


def test_more_ends_of_a_process_than_the_limit_end_the_run_by_name() -> None:
    with pytest.raises(TooManyAbandoned) as error:
        score("swallows", then=("exits", "exits", "exits"), max_abandoned=2, timeout_s=0.5)
    text = str(error.value)
    assert text.startswith("reward.name=hostile:Hostile: 3 calls within an hour")
    assert "(call 'exits'; number" not in text and "call 'exits'" in text
    assert "rollout.max_abandoned_calls=2" in text


def test_an_unexplained_end_of_a_process_counts_for_a_call_the_second_time() -> None:
    """Both calls wait when it ends, so that neither is known to be at fault."""
    results = score("exits_in_a_thread", "waits 1", timeout_s=10.0)
    assert "its process ended 2 times" in results.reason("exits_in_a_thread")
    assert results.verdicts["after"].reward == 1.0


@pytest.mark.nightly
def test_a_scorer_that_forks_without_end_is_killed_with_all_its_processes(
    hostile_module: Path,
) -> None:
    results = score("forks_without_end", memory=GIGABYTE, timeout_s=1.0)
    assert results.verdicts["forks_without_end"].reward is None
    assert results.verdicts["after"].reward == 1.0
    assert results.seconds < SECONDS
