"""Rehearse one rank of a cluster on this machine, without a GPU.

Examples, with the settings of launch/train_rl.py:

    python -m launch.rehearsal rank=17 ranks=128 model=qwen3_235b_a22b model.path=DIR \
        parallel=tp4_pp8_ep16 engine=external engine.urls=[http://10.0.0.7:30000] engine.tp=4 \
        model.init=random

Options: rank (0), ranks (the number of all ranks), gpus_per_node (8), gpu (a100, h100, h200 or
b200), micro_batches (as many as fill the pipeline), routing (balanced or skewed), out (a file for
all numbers as JSON, with every collective in order), remedies (true; rehearses changes with which a
rank fits that does not). With model.init=random, DIR needs its
config.json and tokenizer alone. Output: memory by kind, matrix products, collectives and host waits
of one optimizer step, an export, and with run.checkpoint_every a save. Exit code: 0, or 2 for a
setting that is refused, a part that cannot be rehearsed, or a rank that does not fit.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.rehearsal.cuda_guard import load_cuda_guard
from launch.rehearsal.options import Options, read_options
from megatron_rl.contracts.exit_codes import ExitCode, Failure

if TYPE_CHECKING:
    from launch.rehearsal.rank import RankReport
    from megatron_rl.config.schema import Configuration
    from megatron_rl.models.shape import ModelShape

_REPORT_SECONDS = 10.0


def rehearse(options: Options) -> int:
    """Rehearse the rank and print the report. Returns the exit code."""
    load_cuda_guard()
    print(f"rehearsing rank {options.rank} of {options.ranks}", flush=True)
    warnings.filterwarnings("ignore")  # Megatron names the libraries that this machine lacks
    from launch.rehearsal.rank import Place, Workload, rehearse_rank
    from launch.rehearsal.report import describe
    from megatron_rl.models.families import read_shape
    from megatron_rl.planning.memory import rank_memory

    configuration = options.configuration()
    place = Place(options.rank, options.ranks, options.gpus_per_node, options.gpu)
    workload = Workload(options.micro_batches or None, options.routing)
    with _progress():
        report = rehearse_rank(configuration, place, workload)
    shape = read_shape(configuration.model.path)
    plan = rank_memory(configuration, shape, world_size=options.ranks, stage=report.pipeline_stage)
    for line in describe(report, plan):
        print(line)
    if options.out:
        Path(options.out).write_bytes(msgspec.json.encode(report))
    if not report.fits and options.remedies:
        _print_remedies(report, configuration, shape)
    return ExitCode.OK if report.fits else ExitCode.REFUSED


def _print_remedies(report: RankReport, c: Configuration, shape: ModelShape) -> None:
    """Rehearse changes with which the rank fits, and print what each needs and costs."""
    from launch.rehearsal.remedies import rehearse_remedies

    work = report.flops.get("update", 0) / (report.micro_batches * report.tokens)
    peak = sum(report.peak.values())
    for line in rehearse_remedies(c, shape, arguments=sys.argv[1:], peak=peak, work=work):
        print(line, flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """Print every ten seconds that the rehearsal still runs, from a thread."""
    from launch.rehearsal.rank import current_phase

    end = threading.Event()
    start = time.monotonic()

    def report() -> None:
        while not end.wait(_REPORT_SECONDS):
            seconds = time.monotonic() - start
            print(f"{seconds:.0f} s: {current_phase()}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def main() -> int:
    """Run the command and return its exit code."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return ExitCode.OK
    try:
        return rehearse(read_options(sys.argv[1:]))
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
