"""Check that no rank of a grid waits without end, without a GPU.

Example, with the settings of launch/train_rl.py:

    python -m launch.rehearsal.order ranks=512 model=qwen3_235b_a22b model.path=DIR \
        parallel=tp4_pp8_ep16 engine=external engine.urls=[http://10.0.0.7:30000] engine.tp=4 \
        model.init=random layers_per_stage=2

Options: ranks (1), gpus_per_node (8), processes (2, rehearsed at the same time), layers_per_stage
(all; fewer layers repeat the same collectives less often), every_rank (false; true rehearses all
ranks, not one of each class), traces (a folder that keeps what was recorded). Each class of ranks
is rehearsed once with real code. All ranks then progress together in a simulation. Exit code: 0,
or 2 for a fault in the order, or for a setting that cannot be rehearsed.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.order.check import check_order
from launch.rehearsal.order.rehearsals import Job, rehearse_ranks
from launch.rehearsal.order.simulation import OrderFault
from megatron_rl.contracts.exit_codes import ExitCode, Failure

_NUMBERS = {"ranks": 1, "gpus_per_node": 8, "processes": 2, "layers_per_stage": 0}
_MIB = 2**20


@dataclass(frozen=True)
class Options:
    """The options of the command. layers_per_stage: 0 for all. traces: empty for no folder."""

    ranks: int
    gpus_per_node: int
    processes: int
    layers_per_stage: int
    every_rank: bool
    traces: str
    overrides: tuple[str, ...]


def read_options(arguments: Sequence[str]) -> Options:
    """Tell the options from the overrides of the configuration.

    Raises `RehearsalUnavailable` naming option, value, rule and remedy.
    """
    numbers = dict(_NUMBERS)
    every_rank = False
    traces = ""
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in numbers:
            if not value.isdecimal() or (key != "layers_per_stage" and not int(value)):
                raise RehearsalUnavailable(f"{key}={value!r}: give a whole number from 1")
            numbers[key] = int(value)
        elif key == "every_rank":
            if value not in ("true", "false"):
                raise RehearsalUnavailable(f"every_rank={value!r}: give true or false")
            every_rank = value == "true"
        elif key == "traces":
            traces = value
        else:
            overrides.append(argument)
    return Options(**numbers, every_rank=every_rank, traces=traces, overrides=tuple(overrides))


def check(options: Options) -> int:
    """Rehearse the classes, check the order and print the result. Returns the exit code."""
    start = time.monotonic()
    job = Job(
        options.ranks, options.gpus_per_node, options.layers_per_stage, tuple(options.overrides)
    )
    with tempfile.TemporaryDirectory() as folder:
        traces = rehearse_ranks(
            job,
            Path(options.traces or folder),
            processes=options.processes,
            every_rank=options.every_rank,
        )
        seconds = time.monotonic() - start
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{len(traces)} ranks were rehearsed in {seconds:.0f} s "
            f"({children.ru_utime + children.ru_stime:.0f} s of CPU), "
            f"{children.ru_maxrss * 1024 / _MIB:,.0f} MiB at most in one process",
            flush=True,
        )
        start = time.monotonic()
        try:
            result = check_order(traces)
        except OrderFault as fault:
            print(f"FAULT  {fault}")
            return ExitCode.REFUSED
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"ok     {result.operations:,} operations of {options.ranks} ranks in "
        f"{result.groups:,} groups meet, and every rank reaches its end. "
        f"{time.monotonic() - start:.0f} s, {usage.ru_maxrss * 1024 / _MIB:,.0f} MiB"
    )
    for phase, count in result.counts.items():
        print(f"{count:>12,}  {phase}")
    return ExitCode.OK


def main() -> int:
    """Run the command and return its exit code."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return ExitCode.OK
    try:
        return check(read_options(sys.argv[1:]))
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
