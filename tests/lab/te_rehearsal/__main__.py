"""Run the layers of Transformer Engine on this machine, without a GPU.

    make te-rehearsal
    make te-rehearsal ARGS="--only models steps"

Transformer Engine's own Python and Megatron's wrappers run. Its compiled functions are answered in
plain torch, and Triton kernels are interpreted. Exit code: 0, 1 if a check failed, 2 if Transformer
Engine cannot be imported.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.contracts.exit_codes import ExitCode

if TYPE_CHECKING:
    from tests.lab.te_rehearsal.transformer_engine import Rehearsal

PART_NAMES = ("models", "sizes", "checkpoints", "steps", "fp8", "ranks")
NOT_REHEARSED = (
    "numerics and speed of compiled kernels, and Triton's compiler",
    "context parallelism of Transformer Engine's attention, and communication over NCCL",
    "FlashAttention in place of cuDNN's fused attention",
    "CUDA graphs and streams",
)


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="te-rehearsal", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PART_NAMES, default=PART_NAMES)
    parser.add_argument("--table", type=Path, help="a document whose table of calls to replace")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        from tests.lab.te_rehearsal.transformer_engine import start

        rehearsal = start()
    except (ImportError, OSError) as error:
        print(f"Transformer Engine cannot be imported: {error}. Run make te-rehearsal")
        return ExitCode.REFUSED
    from tests.lab.te_rehearsal.report import call_table, write_table

    has_failed = _run(rehearsal, options.only)
    lines = call_table(rehearsal.calls)
    print("\n".join(["", *lines, "", "Not rehearsed:", *(f"- {text}" for text in NOT_REHEARSED)]))
    if options.table is not None:
        write_table(options.table, lines)
    return int(has_failed)


def _run(rehearsal: Rehearsal, parts: Sequence[str]) -> bool:
    """Run parts one after the other. Returns True if a check failed."""
    from megatron_rl.mcore import parallel
    from tests.lab.te_rehearsal.models import GRID, Machine
    from tests.lab.te_rehearsal.parts import PARTS, Stage
    from tests.lab.te_rehearsal.report import Report

    with rehearsal.cuda.off():
        layout = parallel.initialize(GRID, seed=1)
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        stage = Stage(Machine(rehearsal.cuda), layout, Path(scratch), report)
        for part in parts:
            report.part = part
            began = time.monotonic()
            try:
                PARTS[part](stage)
            except Exception as error:  # the other parts go on
                traceback.print_exc()
                report.add("ended early", False, f"{type(error).__name__}: {error}")
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    parallel.shutdown()
    return report.has_failed


if __name__ == "__main__":
    sys.exit(main())
