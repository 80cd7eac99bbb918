"""Measure what order, narrow routes and overlapped rewards bring, with two real engines each.

Start it in the root of the repository. Nothing else should use the cores:

    python -m tests.lab.throughput_ladder                # minutes
    python -m tests.lab.throughput_ladder --spread 0     # the control: all lengths are the same

Each seed is a step with other prompts and lengths. In each round, each step is sampled and scored
on all rungs, one after the other. The lengths are forced. Every rung has the parts of the rungs
before it, except that the last two have different orders.

Output: a Markdown table. `speed-up` is the seconds of the baseline over those of the rung, in the
same round with the same seed: the mean, and the half width of its interval of 95 %. Both rungs of a
ratio sample the same tokens, log-probabilities and routes, bit for bit, or the command ends with
code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from sglang_bridge.keys import RunKeys, create_keys
from tests.lab.throughput_ladder.arguments import add_spread, open_parser, parse
from tests.lab.throughput_ladder.engines import (
    Engines,
    force_lengths,
    request_form,
    start_engines,
)
from tests.lab.throughput_ladder.rungs import (
    BASELINE,
    RUNGS,
    StepResult,
    run_step,
    slow_scorer,
)
from tests.lab.throughput_ladder.workload import Workload
from tests.support.intervals import interval

Results = dict[str, list[StepResult]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    options = parse_arguments(arguments)
    keys = create_keys()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        stack.enter_context(force_lengths())
        engines = _start_engines(stack, Path(logs), keys, options)
        results = asyncio.run(_measure(engines, keys, options))
    digests = {tuple(result.digest for result in steps) for steps in results.values()}
    if len(digests) > 1:
        print("the rungs have sampled different responses", file=sys.stderr)
        return 1
    print("\n".join(table(results)))
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
    return parse(parser, arguments, "scorers")


def table(results: Results) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| rung | seconds of a step | speed-up |"
    yield "|---|---|---|"
    baseline = results[BASELINE.name]
    for name, steps in results.items():
        seconds = fmean(step.seconds for step in steps)
        ratios = [base.seconds / step.seconds for base, step in zip(baseline, steps, strict=True)]
        yield f"| {name} | {seconds:.2f} | {interval(ratios)} |"


def _start_engines(
    stack: contextlib.ExitStack, logs: Path, keys: RunKeys, options: argparse.Namespace
) -> Engines:
    lists = [
        start_engines(
            stack,
            logs,
            keys,
            count=2,
            max_running=options.max_running,
            dtype=options.dtype,
            narrow=narrow,
        )
        for narrow in (True, False)
    ]
    return Engines(*lists)


async def _measure(engines: Engines, keys: RunKeys, options: argparse.Namespace) -> Results:
    workload = Workload(prompts=options.prompts, spread=options.spread)
    form = request_form(workload, keys)
    results: Results = defaultdict(list)
    async with slow_scorer(options.scorers, {"seconds": options.scoring_ms / 1e3}) as rewards:
        # The first round lets engines compile and fill their caches
        for round_index in range(options.rounds + 1):
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
    return dict(results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
