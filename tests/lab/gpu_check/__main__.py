"""Check on one GPU what this trainer needs of it, in calls of at most nine minutes.

Examples:

    python tests/lab/gpu_check --part 1   the most informative stages; then --part 2, --part 3
    python tests/lab/gpu_check --only train parity
    python tests/lab/gpu_check --carry gpu-carry --part 1 --out results
    python tests/lab/gpu_check --small    every stage small, on the CPU
    python tests/lab/gpu_check --pretended      small stages on a CUDA device in the CPU's memory

A stage is a process with a time limit, and the others run when one fails. It needs no network,
engine or compiled library of the trainer: docs/gpu.md lists its requirements.

Outputs: a table of the stages and their measurements. A folder with check.json, which is replaced
whenever a stage ends, and check.log, the output of all stages. Both are complete at any moment.
Exit code: 0; 1 if a stage failed; 2 if nothing could be started, or no result written; 128 and the
number of a signal that ended it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def start() -> int:
    """Run the command line and return the exit code. It needs no installation of this project."""
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from tests.lab.gpu_check.check import main

    return main(sys.argv[1:], description=__doc__)


if __name__ == "__main__":
    sys.exit(start())
