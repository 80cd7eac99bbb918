"""Measure a step of this trainer beside a step of TRL's GRPOTrainer, with the same work.

Start it in the root of the repository. Nothing else should use the cores:

    python -m tests.lab.beside_trl                      # the quickstart's model
    python -m tests.lab.beside_trl --model larger       # random weights
    python -m tests.lab.beside_trl --ranks 1 --threads 2

The first call creates an environment for TRL. A step is a batch of rollouts and its optimizer
steps: those of experiment=quickstart with algo=grpo, in float32, without a reference. Both train
all rollouts. TRL generates with transformers. In each round, both start anew and take turns. Their
first steps do not count.

Output: a Markdown table with the mean and the half width of its interval of 95 % over the rounds.
The ratios are of the same round. `cpu` is the processor time of all processes of the job. `other
cores` are the cores that other programs used meanwhile. It should be near 0: with several threads,
TRL then waits for the slowest of them in every product.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.lab.beside_trl.environment import open_environment
from tests.lab.beside_trl.jobs import Job, configure, our_job, trl_job, write_larger_model
from tests.lab.beside_trl.step_cost import StepCost, measure, running_job
from tests.lab.comparison.runner import exit_on_sigterm
from tests.support.intervals import interval

# The first ones also compile, load and fill caches
_WARM_UP_STEPS = 3
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
_FIELDS = ("wall", "cpu", "sampling", "other_cores")

NAMES = ("TRL", "this trainer")
Round = tuple[StepCost, StepCost]
"""The costs in the order of `NAMES`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    options = parse_arguments(arguments)
    python = open_environment(options.environment.resolve())
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as scratch:
        settings = [f"parallel.ep={options.ranks}", *options.settings]
        if options.model == "larger":
            model = write_larger_model(Path(scratch, "model"))
            settings.insert(0, f"model.path={model}")
        rounds = [
            _measure_round(Path(scratch, f"round-{number}"), python, settings, options, number)
            for number in range(1, options.rounds + 1)
        ]
    print("\n".join(table(rounds)))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.beside_trl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=("tiny", "larger"), default="tiny")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--steps", type=int, default=10, help="to measure in a round; default: 10")
    parser.add_argument("--ranks", type=int, default=2, help="of this trainer; default: 2")
    parser.add_argument(
        "--threads", type=int, default=1, help="of each of its processes; default: 1"
    )
    parser.add_argument("--trl-threads", type=int, default=2, help="of TRL; default: 2")
    parser.add_argument(
        "--environment",
        type=Path,
        default=_CACHE / "megatron_rl/beside_trl",
        help="directory of TRL's environment; default: %(default)s",
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="further settings of this trainer"
    )
    options = parser.parse_intermixed_args(arguments)
    for name in ("steps", "ranks", "threads", "trl_threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)}: at least 1")
    if options.rounds < 2:
        parser.error(f"--rounds={options.rounds}: one round has no interval, give at least 2")
    return options


def _measure_round(
    directory: Path, python: Path, settings: Sequence[str], options: argparse.Namespace, number: int
) -> Round:
    """Measure both trainers. Even rounds begin with this one: a machine may slow down."""
    # One more step, so that nothing after the last one is measured
    steps = _WARM_UP_STEPS + options.steps + 1
    configuration = configure(settings, ranks=options.ranks)
    directories = [directory / "trl", directory / "ours"]
    for folder in directories:
        folder.mkdir(parents=True)
    jobs = [
        trl_job(directories[0], python, configuration, steps=steps),
        our_job(directories[1], settings, ranks=options.ranks, steps=steps),
    ]
    threads = [options.trl_threads, options.threads]
    costs: dict[int, StepCost] = {}
    for index in (1, 0) if number % 2 == 0 else (0, 1):
        costs[index] = _measure_job(jobs[index], directories[index], threads[index], options.steps)
        print(f"round {number}, {NAMES[index]}: {costs[index]}", file=sys.stderr, flush=True)
    return costs[0], costs[1]


def _measure_job(job: Job, directory: Path, threads: int, steps: int) -> StepCost:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    log = directory / "output.log"
    with running_job(job.command, environment, log) as process:
        return measure(process, job.directory, warm_up=_WARM_UP_STEPS, steps=steps, log=log)


def table(rounds: Sequence[Round]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| seconds of a step | wall | cpu | of wall, waits for rollouts | other cores |"
    yield "|---|---|---|---|---|"
    for index, name in enumerate(NAMES):
        cells = [interval([getattr(costs[index], field) for costs in rounds]) for field in _FIELDS]
        yield f"| {name} | {' | '.join(cells)} |"
    ratios = [
        interval([getattr(ours, field) / getattr(trl, field) for trl, ours in rounds])
        for field in _FIELDS[:3]
    ]
    yield f"| this trainer / TRL | {' | '.join(ratios)} | |"


if __name__ == "__main__":
    sys.exit(main())
