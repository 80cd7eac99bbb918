"""Measure for how long training waits for verdicts after the last response.

Start it in the root of the repository:

    python -m tests.lab.throughput_ladder.exposed_rewards              # steps with forced lengths
    python -m tests.lab.throughput_ladder.exposed_rewards --runs 5     # runs of five steps, too

Each scorer is open in one process and in two. Each step samples the responses of
`throughput_ladder` with real engines, and scores each one as soon as it is there. An engine keeps
about one core busy.

Output: a Markdown table of means, with half widths of their intervals of 95 %.

call: seconds of the scorer for a response, by its settings. exposed: seconds from the last response
to the last verdict. beyond: the exposed time without the call whose verdict came last, as a share
of the time of sampling. within: the steps where `beyond` is at most 5 %.

`--runs` trains the quickstart with each scorer, and prints a second table. sampling: until the last
response, with `rollout.max_staleness=0`. exposed: `time/reward_exposed`. waits: how much of it the
trainer waits for. With `rollout.max_staleness=1`, rollouts of the next step are scored while a step
trains.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.records.past_run import read_metrics
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys, create_keys
from tests.lab.throughput_ladder.arguments import open_parser, parse
from tests.lab.throughput_ladder.engines import (
    Engines,
    force_lengths,
    request_form,
    start_engines,
)
from tests.lab.throughput_ladder.rungs import (
    RUNGS,
    SCORER,
    StepResult,
    prompt_of,
    run_step,
    slow_scorer,
)
from tests.lab.throughput_ladder.scorer import Slow
from tests.lab.throughput_ladder.workload import Workload
from tests.support.intervals import interval
from tests.support.jobs import ROOT, start_job

SCORERS: Mapping[str, Mapping[str, Any]] = {
    "waits 0.3 s": {"seconds": 0.3, "waits": True},
    "waits 0.3 s, 3 s in 5 %": {"seconds": 0.3, "waits": True, "slow_share": 0.05},
    "works 6 ms": {"seconds": 0.006},
    "works 6 ms, 60 ms in 5 %": {"seconds": 0.006, "slow_share": 0.05},
}
PROCESSES = (1, 2)
ALLOWED_SHARE = 0.05  # of the time of sampling
TIMES = ("step", "rollout", "next_rollouts", "reward_exposed")
(RUNG,) = (rung for rung in RUNGS if rung.name == "longest first, by history")


@dataclass(frozen=True)
class Exposure:
    """A step's exposed time.

    sampling: seconds until the last response. wait: seconds from there to the last verdict.
    call: mean seconds of the scorer for a response. last_call: those for the response whose verdict
    came last.
    """

    sampling: float
    wait: float
    call: float
    last_call: float

    @property
    def beyond(self) -> float:
        """The exposed time without the last call, as a share of the time of sampling."""
        return max(0.0, self.wait - self.last_call) / self.sampling


Exposures = dict[tuple[str, int], list[Exposure]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit code."""
    options = parse_arguments(arguments)
    keys = create_keys()
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        stack.enter_context(force_lengths())
        engines = start_engines(
            stack,
            Path(logs),
            keys,
            count=options.engines,
            max_running=options.max_running,
            dtype="float32",
        )
        exposures = asyncio.run(_measure(engines, keys, options))
    print("\n".join(table(exposures)))
    if options.runs:
        print()
        for line in measure_runs(options.runs):
            print(line, flush=True)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = open_parser("python -m tests.lab.throughput_ladder.exposed_rewards", __doc__)
    parser.add_argument("--engines", type=int, default=1, help="default: 1")
    parser.add_argument("--runs", type=int, default=0, help="steps of real runs; default: no runs")
    options = parse(parser, arguments, "engines")
    if options.runs < 0 or 0 < options.runs < 3:
        parser.error(f"--runs={options.runs}: 0, or at least 3, because the first is left out")
    return options


def table(exposures: Exposures) -> Iterator[str]:
    """Yield the lines of the table of steps."""
    yield "| scorer | processes | sampling, s | call, s | exposed, s | beyond | within |"
    yield "|---|---|---|---|---|---|---|"
    for (name, processes), steps in exposures.items():
        num_within = sum(step.beyond <= ALLOWED_SHARE for step in steps)
        cells = (
            name,
            processes,
            f"{fmean(step.sampling for step in steps):.2f}",
            f"{fmean(step.call for step in steps):.4f}",
            interval([step.wait for step in steps], 3),
            f"{interval([100 * step.beyond for step in steps], 1)} %",
            f"{num_within} of {len(steps)}",
        )
        yield f"| {' | '.join(map(str, cells))} |"


async def _measure(
    engines: Sequence[Engine], keys: RunKeys, options: argparse.Namespace
) -> Exposures:
    workload = Workload(prompts=options.prompts)
    form = request_form(workload, keys)
    both = Engines(narrow=engines, wide=())
    exposures: Exposures = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        runners = {
            (name, processes): await stack.enter_async_context(slow_scorer(processes, settings))
            for (name, settings), processes in _scorers()
        }
        # The first round lets engines compile and fill their caches
        for round_index in range(options.rounds + 1):
            for seed, (key, rewards) in itertools.product(range(options.seeds), runners.items()):
                responses = workload.responses(seed)
                result = await run_step(RUNG, both, responses, form, rewards, options.max_running)
                if round_index:
                    exposure = _exposure(result, _calls(Slow(**SCORERS[key[0]]), workload, seed))
                    exposures[key].append(exposure)
                    line = f"round {round_index}, seed {seed}, {key}: {exposure}"
                    print(line, file=sys.stderr, flush=True)
    return dict(exposures)


def _scorers() -> Iterator[tuple[tuple[str, Mapping[str, Any]], int]]:
    return ((scorer, processes) for scorer in SCORERS.items() for processes in PROCESSES)


def _calls(scorer: Slow, workload: Workload, seed: int) -> dict[str, float]:
    """Return the seconds of the scorer for each response, by the name of the response."""
    responses = workload.responses(seed)
    return {r.name: scorer.seconds_for(prompt_of(r), "") for r in responses}


def _exposure(result: StepResult, calls: Mapping[str, float]) -> Exposure:
    return Exposure(
        sampling=result.seconds - result.exposed_seconds,
        wait=result.exposed_seconds,
        call=fmean(calls.values()),
        last_call=calls[result.last_scored],
    )


def measure_runs(num_steps: int) -> Iterator[str]:
    """Yield the lines of the table of runs. The first step of a run is left out."""
    yield "| scorer | processes | max_staleness | sampling, s | exposed, s | waits, s |"
    yield "|---|---|---|---|---|---|"
    for (name, settings), processes in _scorers():
        for staleness in (0, 1):
            times = run_times(num_steps, settings, processes, staleness)
            exposures = [step["reward_exposed"] for step in times[1:]]
            # Rollouts that are sampled ahead are waited for at the end of the step before
            rests = [a["next_rollouts"] + b["rollout"] for a, b in itertools.pairwise(times)]
            waits = [min(pair) for pair in zip(exposures, rests, strict=True)]
            sampling = f"{fmean(rests) - fmean(exposures):.2f}" if not staleness else ""
            seconds = (interval(exposures, 3), interval(waits, 3))
            cells = (name, processes, staleness, sampling, *seconds)
            yield f"| {' | '.join(map(str, cells))} |"


def run_times(
    num_steps: int, settings: Mapping[str, Any], processes: int, staleness: int
) -> list[dict[str, float]]:
    """Train the quickstart, and return the times of its steps."""
    options = ", ".join(f"{key}: {value}" for key, value in settings.items())
    os.environ["PYTHONPATH"] = str(ROOT)  # of the scorer
    with tempfile.TemporaryDirectory() as root:
        job = start_job(
            Path(root),
            "eval.every=0",
            f"train.total_steps={num_steps}",
            "rollout.prompts_per_step=32",
            "engine.max_running_requests=8",  # so that responses end one after the other
            "reward=custom",
            f"reward.name={SCORER}",
            f"reward.options={{{options}}}",
            f"reward.processes={processes}",
            f"rollout.max_staleness={staleness}",
            experiment="quickstart",
        )
        output, _ = job.communicate()
        if job.returncode:
            raise SystemExit(f"a run ended with code {job.returncode}:\n{output[-4000:]}")
        records = [r for r in read_metrics(Path(root) / "job") if "time/step" in r]
    times = [{name: record.get(f"time/{name}") or 0.0 for name in TIMES} for record in records]
    print(f"{options}, {processes}, staleness {staleness}: {times}", file=sys.stderr, flush=True)
    return times


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
