"""Opens user-defined classes in processes, and makes calls, as a collector does."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner
from megatron_rl.rollouts.user_process.messages import OpenClass
from megatron_rl.rollouts.user_process.remote_class import RemoteClass
from megatron_rl.rollouts.user_process.user_classes import ScorerInProcess

PROMPT = Prompt(id="p", token_ids=(1,), answer="1", task="t")
# Acts on a class while its calls run
Act = Callable[[RemoteClass], Awaitable[None]]


@dataclass
class Results:
    """Verdicts of calls by text, and what happened.

    seconds: from the calls to the last verdict. warnings: those for rank 0.
    """

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    def reason(self, text: str) -> str:
        """Return why a call has no reward."""
        verdict = self.verdicts[text]
        assert verdict.reward is None
        return verdict.reason


def open_class(
    settings: RewardSettings,
    report: Callable[[str], Awaitable[None]],
    *,
    open_timeout_s: float = 60.0,
    grace_s: float = 1.5,
) -> RemoteClass:
    """Open a scorer in a process. Raises `PluginError`, and then leaves no process."""
    opening = OpenClass(search_path=tuple(sys.path), reward=settings, grace_s=grace_s)
    remote_class = RemoteClass(
        f"reward.name={settings.name}", opening, open_timeout_s=open_timeout_s, report=report
    )
    try:
        remote_class.wait_until_open()
    except BaseException:
        remote_class.end_now()
        raise
    return remote_class


async def do_nothing(remote_class: RemoteClass) -> None:
    """Let calls run."""


def score_in_process(
    name: str,
    *texts: str,
    timeout_s: float = 2.0,
    then: tuple[str, ...] = ("after",),
    act: Act = do_nothing,
    options: dict[str, object] | None = None,
    **opening: float,
) -> Results:
    """Score these texts at the same time, and then others one after the other.

    act: runs beside the first calls. opening: arguments of `open_class`.
    All processes have ended when this returns.
    """
    results = Results()

    async def report(text: str) -> None:
        results.warnings.append(text)

    async def run() -> None:
        settings = RewardSettings(name=name, options=options or {}, timeout_s=timeout_s)
        remote_class = open_class(settings, report, **opening)
        runner = RewardRunner(ScorerInProcess(remote_class))

        async def score(text: str) -> None:
            verdict = await runner.score(PROMPT, text, FinishReason.STOP, subject=f"call {text!r}")
            results.verdicts[text] = verdict

        start = time.monotonic()
        try:
            await asyncio.gather(act(remote_class), *map(score, texts))
            results.seconds = time.monotonic() - start
            for text in then:
                await score(text)
        finally:
            await remote_class.close()

    earlier = set(psutil.Process().children(recursive=True))
    asyncio.run(run())
    assert set(psutil.Process().children(recursive=True)) - earlier == set()
    return results


def signal_process_of(
    file: Path, number: signal.Signals, *, times: int = 1, stopped_s: float = 0.0
) -> Act:
    """Return what sends a signal to each new process of a class, some time after its first call.

    file: has a line for each call, which begins with the process id. times: number of processes.
    stopped_s: seconds until a process is continued (SIGCONT), if it still runs.
    """

    async def act(remote_class: RemoteClass) -> None:
        known: set[int] = set()
        for _ in range(times):
            while not (new := set(first_words(file)) - known):
                await asyncio.sleep(0.05)
            known |= new
            await asyncio.sleep(0.3)
            for pid in new:
                os.kill(pid, number)
            await asyncio.sleep(stopped_s)
            for pid in new if stopped_s else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    return act


def first_words(file: Path) -> list[int]:
    """Return the numbers at the beginning of the lines of a file that may be missing."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [int(line.split()[0]) for line in lines]


def is_running(pid: int) -> bool:
    """Return True for a process that runs and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until a condition holds. Returns False after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids_in(file: Path) -> list[int]:
    """Return the process ids that a hostile class wrote."""
    return [int(line) for line in file.read_text().split()]
