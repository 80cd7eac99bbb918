"""Train with two engines, inject a random fault every two minutes, and print what it costs.

Start it in the root of the repository:

    python -m tests.lab.soak [--minutes 20] [--every 120] [--seed 0] [--keep DIRECTORY]

Output: each fault with the seconds until the next step, the share of the time that undisturbed
steps would have needed for as many steps, the growth of memory, descriptors, /dev/shm and files
after the first five minutes (or the first quarter, if that is less), and what the measured loss
means at one failure in 50,700 GPU-hours.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from pathlib import Path

import msgspec

from tests.lab.faults.follower import RunFollower
from tests.lab.faults.table import find_collector, find_engine
from tests.lab.soak.effective_time import (
    GPU_HOURS_PER_FAILURE,
    EffectiveTime,
    measure,
    model_share,
)
from tests.lab.soak.resources import ResourceLog
from tests.support.jobs import process_tree

_SETTINGS = (
    "engine.count=2",
    "train.total_steps=100000",
    "recovery.restarts_per_hour=60",
    "logger.progress=true",
    "samples.every=0",
    "run.checkpoint_every=50",
    "run.keep_checkpoints=1",
)
_FAULTS = {
    "SIGKILL engine": (find_engine, signal.SIGKILL),
    "SIGSTOP engine": (find_engine, signal.SIGSTOP),
    "SIGKILL collector": (find_collector, signal.SIGKILL),
}
_WARM_UP_SECONDS = 300.0
_SAMPLE_SECONDS = 5.0
_WINDOW_SECONDS = 60.0
_START_SECONDS = 600.0
_END_SECONDS = 120.0


class Soak:
    """A run with random faults. every: seconds between them."""

    def __init__(self, directory: Path, *, seconds: float, every: float, seed: int) -> None:
        self._seconds = seconds
        self._every = every
        self._random = random.Random(seed)
        self.follower = RunFollower(directory, [*_SETTINGS, f"seed={seed}"], ranks=1)
        self.log = ResourceLog(self.follower.run)
        self.faults: list[tuple[float, str]] = []

    def run(self) -> None:
        """Run to the end. Raises AssertionError if the run ends before."""
        follower = self.follower
        follower.wait_for_step(1, _START_SECONDS)
        start = time.monotonic()
        next_fault = start + self._every
        next_sample = start
        while (now := time.monotonic()) < start + self._seconds:
            assert follower.watch(), f"the run ended:\n{follower.output[-6000:]}"
            if now >= next_sample:
                self.log.take(now - start, process_tree(follower.job))
                next_sample = now + _SAMPLE_SECONDS
            if now >= next_fault and now < start + self._seconds - self._every / 2:
                self._strike()
                next_fault += self._every
        follower.job.send_signal(signal.SIGTERM)
        follower.wait(_END_SECONDS)

    def _strike(self) -> None:
        name = self._random.choice(sorted(_FAULTS))
        find, number = _FAULTS[name]
        processes = find(self.follower.scene())
        if processes:
            self.faults.append((time.monotonic(), name))
            self._random.choice(processes).send_signal(number)


def main() -> None:
    """Run, and print what it cost."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory to create for the run")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        directory = (options.keep or Path(scratch)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        soak = Soak(directory, seconds=seconds, every=options.every, seed=options.seed)
        try:
            soak.run()
        finally:
            (directory / "output.txt").write_text(soak.follower.output)
            (directory / "samples.json").write_bytes(msgspec.json.encode(soak.log.samples))
            if soak.follower.job.poll() is None:
                soak.follower.kill()
        settle = min(0.75 * options.every, 90.0)
        print_times(measure(soak.follower.step_times, soak.faults, settle=settle))
        print_growth(soak.log, min(_WARM_UP_SECONDS, seconds / 4))
        print(f"end: {json.loads((soak.follower.run / 'exit.json').read_text())}")


def print_times(times: EffectiveTime) -> None:
    """Print what each fault cost, and what that means for large machines."""
    print("| fault | next step after | time lost |")
    print("|---|---|---|")
    for recovery in times.recoveries:
        print(f"| {recovery.fault} | {recovery.seconds:.0f} s | {recovery.lost_seconds:.0f} s |")
    print(
        f"\n{times.num_steps} steps in {times.wall_seconds:.0f} s, an undisturbed one takes "
        f"{times.step_seconds:.2f} s: effective training time {100 * times.share:.1f} %"
    )
    loss = times.lost_seconds_per_fault
    print(f"a fault costs {loss:.1f} s; at one failure in {GPU_HOURS_PER_FAILURE:,.0f} GPU-hours:")
    for num_gpus in (64, 512, 4096):
        print(f"- {num_gpus} GPUs: {100 * model_share(loss, num_gpus):.3f} %")


def print_growth(log: ResourceLog, warm_up: float) -> None:
    """Print how much each quantity grew after the first minutes."""
    window = min(_WINDOW_SECONDS, (log.samples[-1].seconds - warm_up) / 3)
    print(f"\n| after {warm_up:.0f} s | first {window:.0f} s | last {window:.0f} s | growth |")
    print("|---|---|---|---|")
    for row in log.growth(warm_up, window):
        print(
            f"| {row.name} | {row.before:,.0f} {row.unit} | {row.after:,.0f} {row.unit} | "
            f"{100 * row.share:+.1f} % |"
        )


if __name__ == "__main__":
    main()
