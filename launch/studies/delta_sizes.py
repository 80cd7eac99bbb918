"""Measure how many bytes of the weights change in a step, and how many travel with sync.delta.

Start it in the root of the repository:

    python -m launch.studies.delta_sizes --out runs/deltas

It trains the quickstart with each dtype and learning rate, one run after the other, over the disk
transport (sync.transport=disk sync.delta=true). Each sync is what engines load, and the last one
is audited. To continue an interrupted study, run the same command again: complete runs are kept.

Output: a Markdown table, in percent of the bytes of all weights.

    changed   bytes that differ from those of the last sync
    travel    bytes of the files of changes: compressed
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.testbed.jobs import last_step, start_job
from megatron_rl.config.cli import compose
from megatron_rl.contracts.exit_codes import ExitCode, Failure

QUICKSTART_RATE = compose(["experiment=quickstart"]).optimizer.lr
RATES = (QUICKSTART_RATE, 1e-5, 1e-6)
DTYPES = ("bfloat16", "float32")
# In the first step, Adam moves every weight that has a gradient by the whole rate
SHOWN_STEPS = (1, 2, 4, 8)


class RunFailed(Failure):
    """A run of the study ended before its last step."""


class Variant(NamedTuple):
    """A run of the study. rate: of the optimizer."""

    dtype: str
    rate: float

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.rate:g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table and return the exit code."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    variants = [Variant(dtype, rate) for dtype in DTYPES for rate in options.rate or RATES]
    try:
        for variant in variants:
            train(variant, options.out)
        print("\n".join(table(variants, options.out)))
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.delta_sizes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument(
        "--rate", type=float, action="append", help="a learning rate, instead of the three"
    )
    return parser.parse_args(arguments)


def train(variant: Variant, out: Path) -> None:
    """Train one variant, unless it is complete. Raises `RunFailed`."""
    root = out / variant.name
    steps = SHOWN_STEPS[-1]
    if last_step(root / "job" / "metrics.jsonl") >= steps:
        return
    shutil.rmtree(root, ignore_errors=True)
    job = start_job(
        root,
        f"model.dtype={variant.dtype}",
        f"engine.dtype={variant.dtype}",
        f"optimizer.lr={variant.rate:g}",
        "sync.transport=disk",
        "sync.delta=true",
        f"train.total_steps={steps}",
        f"sync.audit_every={steps}",
        "eval.every=0",
        "run.checkpoint_every=0",
        "optimizer.warmup_steps=0",
        "optimizer.decay=constant",
        experiment="quickstart",
    )
    try:
        output, _ = job.communicate()
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
    if job.returncode:
        raise RunFailed(f"{root}: the run ended with {job.returncode}\n{output[-4000:]}")


def read_steps(run: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step of a run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


def table(variants: Sequence[Variant], out: Path) -> Iterator[str]:
    """Yield the lines of the table."""
    steps = [f"step {step}: changed | travel" for step in SHOWN_STEPS]
    yield "| weights | learning rate | MB | " + " | ".join(steps) + " |"
    yield "|---" * (3 + 2 * len(SHOWN_STEPS)) + "|"
    for variant in variants:
        records = read_steps(out / variant.name / "job")
        first = records[SHOWN_STEPS[0]]
        size = first["sync/delta/bytes"] / first["sync/delta/share"] / 1e6
        cells = [variant.dtype, f"{variant.rate:g}", f"{size:.2f}"]
        for step in SHOWN_STEPS:
            cells.append(f"{100 * records[step]['sync/delta/changed']:.1f}")
            cells.append(f"{100 * records[step]['sync/delta/share']:.1f}")
        yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
