"""Measure what order, narrow routes and overlapped rewards bring, with two real engines each.

Start it in the root of the repository. Nothing else should use the cores:

    python -m tests.lab.throughput_ladder                # minutes
    python -m tests.lab.throughput_ladder --spread 0     # the control: all lengths are the same
    python -m tests.lab.throughput_ladder --runs 12      # whole runs of twelve steps, too

Each seed is a step with other prompts and lengths. In each round, each step is sampled and scored
on all rungs, one after the other. The lengths are forced. Every rung has the parts of the rungs
before it, except that the last two have different orders.

Output: a Markdown table. `measured` is the seconds of the baseline over those of the rung, in the
same round with the same seed: the mean, and the half width of its interval of 95 %. Both rungs of a
ratio sample the same tokens, log-probabilities and routes, bit for bit, or the command ends with
code 1. `simulated` is the same ratio of simulated steps with the same lengths. Its engines and
scorers are as fast as in other steps, whose responses all have the same length, and which are
measured in each round. `difference`: of the simulated ratio from the measured one. Bar: 5 %.
`published`: of another program, see `Rung`.

`--runs` trains the quickstart with this scorer, without and with sampling ahead, and prints a
second table. The last table is simulated: what each part brings on a cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from sglang_bridge.keys import RunKeys, create_keys
from tests.lab.run_time.clusters import SMALL, Scenario
from tests.lab.run_time.parts import part_table
from tests.lab.throughput_ladder.arguments import add_spread, open_parser, parse
from tests.lab.throughput_ladder.engines import (
    Engines,
    force_lengths,
    request_form,
    start_engines,
)
from tests.lab.throughput_ladder.exposed_rewards import run_times
from tests.lab.throughput_ladder.rungs import (
    BASELINE,
    NUM_ENGINES,
    RUNGS,
    Rung,
    StepResult,
    run_step,
    slow_scorer,
)
from tests.lab.throughput_ladder.simulation import (
    Calibration,
    Parts,
    calibration_responses,
    fit_engines,
    step_seconds,
)
from tests.lab.throughput_ladder.workload import Response, Workload
from tests.support.intervals import interval

Results = dict[str, list[StepResult]]
# By round, with wide and with narrow routes, and by step of calibration
Calibrations = list[list[StepResult]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    options = parse_arguments(arguments)
    keys = create_keys()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        stack.enter_context(force_lengths())
        engines = _start_engines(stack, Path(logs), keys, options)
        results, calibrations = asyncio.run(_measure(engines, keys, options))
    digests = {tuple(result.digest for result in steps) for steps in results.values()}
    if len(digests) > 1:
        print("the rungs have sampled different responses", file=sys.stderr)
        return 1
    print("\n".join(table(results, simulated_ratios(calibrations, options))))
    if options.runs:
        print()
        print("\n".join(run_table(options.runs, options.scoring_ms / 1e3, options.scorers)))
    print()
    print("\n".join(part_table(SMALL if options.small else Scenario())))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = open_parser("python -m tests.lab.throughput_ladder", __doc__)
    add_spread(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--scoring-ms", type=float, default=6.0, help="CPU time of a response; default: 6"
    )
    parser.add_argument("--scorers", type=int, default=1, help="its processes; default: 1")
    parser.add_argument("--runs", type=int, default=0, help="steps of whole runs; default: no runs")
    parser.add_argument("--small", action="store_true", help="a small simulated cluster")
    options = parse(parser, arguments, "scorers")
    if options.runs and options.runs < 3:
        parser.error(f"--runs={options.runs}: 0, or at least 3, because the first is left out")
    return options


def table(results: Results, simulations: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of the table. simulations: the ratio of each rung, by its name."""
    yield "| rung | seconds of a step | measured | simulated | difference | published |"
    yield "|---|---|---|---|---|---|"
    baseline = results[BASELINE.name]
    paper_ratios = {rung.name: rung.paper_ratio for rung in RUNGS}
    for name, steps in results.items():
        seconds = fmean(step.seconds for step in steps)
        ratios = [base.seconds / step.seconds for base, step in zip(baseline, steps, strict=True)]
        difference = simulations[name] / fmean(ratios) - 1
        cells = (
            name,
            f"{seconds:.2f}",
            interval(ratios),
            f"{simulations[name]:.2f}",
            f"{difference:+.1%}",
            str(paper_ratios.get(name) or ""),
        )
        yield "| " + " | ".join(cells) + " |"


def simulated_ratios(calibrations: Calibrations, options: argparse.Namespace) -> dict[str, float]:
    """Return the ratio of each rung: the mean over the seeds."""
    responses = list(calibration_responses(options.max_running))
    all_steps = [
        Calibration(own_responses, step.seconds - step.exposed_seconds)
        for steps in calibrations
        for own_responses, step in zip(responses, steps, strict=True)
    ]
    exposed_seconds = fmean(steps[-1].exposed_seconds for steps in calibrations)
    parts = Parts(
        speed=fit_engines(all_steps, options.max_running),
        max_running=options.max_running,
        call=exposed_seconds * options.scorers / len(responses[-1]),
        scorers=options.scorers,
        cores=len(os.sched_getaffinity(0)),
    )
    print(parts, file=sys.stderr, flush=True)
    workload = Workload(prompts=options.prompts, spread=options.spread)
    steps_of_seeds = [workload.responses(seed) for seed in range(options.seeds)]
    return {rung.name: _simulated_ratio(rung, steps_of_seeds, parts) for rung in RUNGS}


def _simulated_ratio(rung: Rung, steps: Sequence[Sequence[Response]], parts: Parts) -> float:
    return fmean(
        step_seconds(BASELINE, responses, parts) / step_seconds(rung, responses, parts)
        for responses in steps
    )


def run_table(num_steps: int, scoring_seconds: float, scorers: int) -> Iterator[str]:
    """Yield the table of whole runs, without their first and their last steps."""
    yield "| whole run | seconds of a step | measured |"
    yield "|---|---|---|"
    base = 0.0
    for staleness in (0, 1):
        times = run_times(num_steps, {"seconds": scoring_seconds}, scorers, staleness)
        # Nothing is sampled ahead during the last step
        seconds = [step["step"] for step in times[1:-1]]
        base = base or fmean(seconds)
        cells = (f"`rollout.max_staleness={staleness}`", interval(seconds))
        yield f"| {' | '.join(cells)} | {base / fmean(seconds):.2f} |"


def _start_engines(
    stack: contextlib.ExitStack, logs: Path, keys: RunKeys, options: argparse.Namespace
) -> Engines:
    lists = [
        start_engines(
            stack,
            logs,
            keys,
            count=NUM_ENGINES,
            max_running=options.max_running,
            dtype=options.dtype,
            narrow=narrow,
        )
        for narrow in (True, False)
    ]
    return Engines(*lists)


async def _measure(
    engines: Engines, keys: RunKeys, options: argparse.Namespace
) -> tuple[Results, Calibrations]:
    workload = Workload(prompts=options.prompts, spread=options.spread)
    form = request_form(workload, keys)
    results: Results = defaultdict(list)
    calibrations: Calibrations = []
    async with slow_scorer(options.scorers, {"seconds": options.scoring_ms / 1e3}) as rewards:
        # The first round lets engines compile and fill their caches
        for round_index in range(options.rounds + 1):
            for rung in RUNGS[:2]:
                steps = [
                    await run_step(rung, engines, responses, form, rewards, options.max_running)
                    for responses in calibration_responses(options.max_running)
                ]
                if round_index:
                    calibrations.append(steps)
            for seed in range(options.seeds):
                responses = workload.responses(seed)
                for rung in RUNGS:
                    result = await run_step(
                        rung, engines, responses, form, rewards, options.max_running
                    )
                    if round_index:
                        results[rung.name].append(result)
                        line = f"round {round_index}, seed {seed}, {rung.name}: "
                        print(f"{line}{result.seconds:.2f} s", file=sys.stderr, flush=True)
    return dict(results), calibrations


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
