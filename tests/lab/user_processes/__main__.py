"""Prints the cost of a call in a process, and the seconds until hostile calls have ended.

python -m tests.lab.user_processes
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import tempfile
import time

import psutil

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner, ScorerInThisProcess, open_scorer
from megatron_rl.rollouts.user_process.messages import OpenClass
from megatron_rl.rollouts.user_process.remote_class import RemoteClass
from megatron_rl.rollouts.user_process.user_classes import ScorerInProcess

NAME = "tests.lab.user_processes.hostile:Hostile"
TIMEOUT_SECONDS = 2.0
GRACE_SECONDS = 5.0
MEMORY_BYTES = 10**9
NUM_CALLS = 2000
PROMPT = Prompt(id="p", token_ids=tuple(range(200)), answer="1", task="t")
# What a call does, by the name of the method
ROWS = {
    "swallows": "swallows its cancellation",
    "blocks": "runs `while True: pass`",
    "stops": "stops its process (SIGSTOP)",
    "forks": "starts processes that ignore SIGTERM, one of them a daemon",
    "forks_without_end": "forks without end",
    "allocates": "allocates without end",
    "allocates_elsewhere": "starts a process that allocates without end",
    "exits": "calls `os._exit`",
    "closes": "closes all descriptors",
    "writes": "writes into the connection",
    "kills_its_supervisor": "kills its supervisor",
}


def open_class(settings: RewardSettings) -> RemoteClass:
    """Open a scorer in a process."""
    opening = OpenClass(search_path=tuple(sys.path), reward=settings, grace_s=GRACE_SECONDS)
    remote_class = RemoteClass(f"reward.name={settings.name}", opening, open_timeout_s=600.0)
    remote_class.wait_until_open()
    return remote_class


async def measure_call(runner: RewardRunner) -> tuple[float, float]:
    """Return the median and the smallest microseconds of a call that does nothing."""
    times = []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        verdict = await runner.score(PROMPT, "after", FinishReason.STOP)
        times.append(time.perf_counter() - start)
        assert verdict.reward == 1.0
    return 1e6 * statistics.median(times), 1e6 * min(times)


async def measure_burst(runner: RewardRunner) -> float:
    """Return the microseconds for each of many calls at the same time."""
    start = time.perf_counter()
    await asyncio.gather(
        *(runner.score(PROMPT, "after", FinishReason.STOP) for _ in range(NUM_CALLS))
    )
    return 1e6 * (time.perf_counter() - start) / NUM_CALLS


async def measure_end(runner: RewardRunner, text: str) -> tuple[float, float, str]:
    """Return the seconds to a hostile call's verdict and to the next call's, and the reason."""
    start = time.monotonic()
    verdict = await runner.score(PROMPT, text, FinishReason.STOP, subject=text)
    seconds = time.monotonic() - start
    await runner.score(PROMPT, "after", FinishReason.STOP)
    assert verdict.reward is None
    return seconds, time.monotonic() - start, verdict.reason


async def work(folder: str) -> None:
    """Measure and print."""
    options = {"folder": folder, "memory": MEMORY_BYTES}
    settings = RewardSettings(name=NAME, options=options, timeout_s=TIMEOUT_SECONDS)
    start = time.monotonic()
    remote_class = open_class(settings)
    print(f"{time.monotonic() - start:.2f} s until the class is open")
    runners = {
        "in a process": RewardRunner(ScorerInProcess(remote_class)),
        "in the collector": RewardRunner(
            ScorerInThisProcess(open_scorer(settings), timeout_s=TIMEOUT_SECONDS)
        ),
    }
    for name, runner in runners.items():
        median, fastest = await measure_call(runner)
        burst = await measure_burst(runner)
        print(
            f"{name}: median {median:.0f} µs for a call alone, {fastest:.0f} µs for the fastest, "
            f"{burst:.0f} µs for each of {NUM_CALLS} at the same time"
        )
    print(
        f"\nreward.timeout_s={TIMEOUT_SECONDS:g}, {MEMORY_BYTES / 1e9:g} GB of memory (setrlimit)\n"
    )
    print("| the call | seconds to its end | until the next call has its verdict | reason |")
    print("|---|---|---|---|")
    for text, action in ROWS.items():
        seconds, next_seconds, reason = await measure_end(runners["in a process"], text)
        print(f"| {action} | {seconds:.1f} | {next_seconds:.1f} | {reason} |", flush=True)
    await remote_class.close()
    print(f"\n{len(psutil.Process().children(recursive=True))} processes are left")


def main() -> None:
    """Measure in a temporary folder."""
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(work(folder))


if __name__ == "__main__":
    main()
