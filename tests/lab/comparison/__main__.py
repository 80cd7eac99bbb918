"""Train several variants over several seeds, and report them in one table and one plot.

Start it in the root of the repository:

    python -m tests.lab.comparison --out runs/algorithms --seeds 0,1,2 \\
        --variant espo: algo=espo --variant grpo: algo=grpo \\
        --variant frozen@0,1: optimizer.lr=0

Each run is OUT/NAME-seedN. A complete run is not repeated, so the same command continues a
comparison that was interrupted. A complete run of another configuration in that place is refused.
Outputs: OUT/table.md, OUT/curves.json and OUT/curves.png.

Rollout tokens until equal held-out accuracy, which needs an evaluation every few steps. Outputs:
OUT/tokens.md, OUT/tokens.json and OUT/tokens.png; docs/comparisons.md explains them.

    python -m tests.lab.comparison --out runs/tokens --experiment mixed --equal-accuracy \\
        --against oversample --common eval.every=4 \\
        --variant oversample: selection=oversample --variant belief: selection=belief

Other metrics over the steps. Outputs: OUT/metrics.md, OUT/metrics.json and OUT/metrics.png.

    python -m tests.lab.comparison --out runs/stability --common engine.dtype=bfloat16 \\
        --metric mismatch/k3_kl \\
        --variant replay: train.replay=rollout --variant live: train.replay=off

With --shared-engines on CPUs a run samples what it would sample with an engine of its own
(docs/repeatable.md). On GPUs the random numbers of an engine continue from one run to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.lab.comparison.arguments import make_parser
from tests.lab.comparison.errors import exit_code_of
from tests.lab.comparison.reports import (
    curves_by_variant,
    write_accuracy,
    write_metrics,
    write_tokens,
)
from tests.lab.comparison.runner import EngineOverrides, exit_on_sigterm, train_all
from tests.lab.comparison.shared_engines import check_shareable, shared_engines
from tests.lab.comparison.variants import (
    ComparisonRefused,
    Run,
    RunPlanner,
    check_overrides,
    is_complete,
    read_variants,
)

SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "train_rl.py"
# Trains runs that are not complete. Returns 0, or the exit code of the run that failed.
Train = Callable[[Sequence[Run], Callable[[Run], None]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of the run that failed, or 0."""
    options = make_parser(__doc__ or "").parse_args(arguments)

    def work() -> int:
        check_options(options)
        with exit_on_sigterm():
            return compare_variants(options)

    return exit_code_of(work)


def check_options(options: argparse.Namespace) -> None:
    """Raise `ComparisonRefused` for options that are wrong whatever the configurations are."""
    if find_spec("matplotlib") is None:
        raise ComparisonRefused("matplotlib draws the plots and is not installed. Run make install")
    check_overrides(options.common, "--common")
    _check_against(options)
    gpus = LaunchFacts.from_environment(os.environ).num_gpus
    if options.parallel > 1 and gpus:
        raise ComparisonRefused(
            f"--parallel {options.parallel}: {gpus} GPU(s) are visible, and runs would share "
            "them. Leave it out"
        )


def _check_against(options: argparse.Namespace) -> None:
    names = [variant.name for variant in read_variants(options.variant, options.seeds)]
    if options.against is None:
        return
    if options.equal_accuracy is None:
        raise ComparisonRefused(
            f"--against {options.against}: it needs --equal-accuracy. Give that too"
        )
    if options.against not in names:
        raise ComparisonRefused(
            f"--against {options.against}: the variants are {', '.join(names)}. Name one of them"
        )


def plan_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Plan every run of a comparison. Raises `ComparisonRefused`.

    Variants take turns, so that a machine that slows down slows all of them.
    """
    planner = RunPlanner(options.out, options.experiment, options.nproc, tuple(options.common))
    variants = read_variants(options.variant, options.seeds)
    for turn in range(max(len(variant.seeds) for variant in variants)):
        for variant in variants:
            for seed in variant.seeds[turn : turn + 1]:
                yield planner.run(variant.name, variant.overrides, seed)


def compare_variants(options: argparse.Namespace) -> int:
    """Train the runs that are not complete, and write the report after every run."""
    runs = list(plan_runs(options))
    # All runs are checked before the first one starts.
    complete_directories = {run.directory for run in runs if is_complete(run)}

    def report(run: Run) -> None:
        complete_directories.add(run.directory)
        complete_runs = [run for run in runs if run.directory in complete_directories]
        write_accuracy(curves_by_variant(complete_runs), options.out)

    with _training(options, runs) as train:
        code = train([run for run in runs if run.directory not in complete_directories], report)
        if code:
            return code
    results = curves_by_variant(runs)
    write_accuracy(results, options.out)
    write_tokens(results, options)
    write_metrics(runs, options)
    print((options.out / "table.md").read_text() + f"\nplot: {options.out / 'curves.png'}")
    return ExitCode.OK


@contextlib.contextmanager
def _training(options: argparse.Namespace, runs: Sequence[Run]) -> Iterator[Train]:
    """Yield the function that trains runs.

    Shared engines start with the first run and stop at the end of the block.
    """
    if options.shared_engines:
        check_shareable(runs, LaunchFacts.from_environment(os.environ))
    with contextlib.ExitStack() as stack:
        engines: list[EngineOverrides] = [] if options.shared_engines else [()] * options.parallel

        def train(incomplete: Sequence[Run], on_complete: Callable[[Run], None]) -> int:
            if incomplete and not engines:
                directory = options.out / "engines"
                context = shared_engines(runs[0].configuration, options.parallel, directory)
                engines.extend(stack.enter_context(context))
            return train_all(incomplete, SCRIPT, engines, options.nproc, on_complete)

        yield train


if __name__ == "__main__":
    sys.exit(main())
