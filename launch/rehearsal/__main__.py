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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import msgspec

from launch.rehearsal.cuda_guard import RehearsalUnavailable, load_cuda_guard
from launch.rehearsal.gpus import GPUS, Gpu
from launch.rehearsal.synthetic_batches import Routing
from megatron_rl.contracts.exit_codes import ExitCode, Failure

if TYPE_CHECKING:
    from launch.rehearsal.rank import RankReport
    from megatron_rl.config.schema import Configuration
    from megatron_rl.models.shape import ModelShape

_REPORT_SECONDS = 10.0
_INTEGERS = {"rank": 0, "ranks": 1, "gpus_per_node": 8, "micro_batches": 0}


@dataclass(frozen=True)
class Options:
    """The options of the command.

    micro_batches: 0 for as many as fill the pipeline. out: empty for no file.
    """

    rank: int
    ranks: int
    gpus_per_node: int
    micro_batches: int
    gpu: Gpu
    routing: Routing
    out: str
    remedies: bool
    overrides: tuple[str, ...]


def read_options(arguments: Sequence[str]) -> Options:
    """Tell the command's options from the overrides of the configuration.

    Raises `RehearsalUnavailable` naming option, value, rule and remedy.
    """
    texts = {"gpu": "h100", "routing": "balanced", "out": "", "remedies": "true"}
    numbers = dict(_INTEGERS)
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in texts:
            texts[key] = value
        elif key in numbers:
            numbers[key] = _read_number(key, value)
        else:
            overrides.append(argument)
    if texts["gpu"] not in GPUS:
        raise RehearsalUnavailable(f"gpu={texts['gpu']!r}: choose one of {', '.join(GPUS)}")
    if texts["routing"] not in get_args(Routing):
        raise RehearsalUnavailable(
            f"routing={texts['routing']!r}: choose one of {', '.join(get_args(Routing))}"
        )
    if texts["remedies"] not in ("true", "false"):
        raise RehearsalUnavailable(f"remedies={texts['remedies']!r}: give true or false")
    if not 0 <= numbers["rank"] < numbers["ranks"]:
        raise RehearsalUnavailable(
            f"rank={numbers['rank']}: there are ranks={numbers['ranks']}, counted from 0. Give a "
            "smaller rank, or more ranks"
        )
    return Options(
        **numbers,
        gpu=GPUS[texts["gpu"]],
        routing=cast(Routing, texts["routing"]),
        out=texts["out"],
        remedies=texts["remedies"] == "true",
        overrides=tuple(overrides),
    )


def _read_number(key: str, value: str) -> int:
    if not value.isdecimal():
        raise RehearsalUnavailable(f"{key}={value!r}: give a whole number from 0")
    return int(value)


def rehearse(options: Options) -> int:
    """Rehearse the rank and print the report. Returns the exit code."""
    load_cuda_guard()
    print(f"rehearsing rank {options.rank} of {options.ranks}", flush=True)
    warnings.filterwarnings("ignore")  # Megatron names the libraries that this machine lacks
    from launch.rehearsal.rank import Place, Workload, rehearse_rank
    from launch.rehearsal.report import describe
    from megatron_rl.config.cli import compose
    from megatron_rl.contracts.launch_facts import LaunchFacts
    from megatron_rl.models.families import read_shape
    from megatron_rl.planning.memory import rank_memory

    facts = LaunchFacts(
        world_size=options.ranks,
        local_world_size=min(options.ranks, options.gpus_per_node),
        num_gpus=options.gpus_per_node,
    )
    configuration = compose(options.overrides, facts=facts)
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

    lines = rehearse_remedies(
        c,
        shape,
        arguments=sys.argv[1:],
        rank=report.place.rank,
        ranks=report.place.world_size,
        peak=sum(report.peak.values()),
        flops=report.flops.get("update", 0),
    )
    for line in lines:
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
