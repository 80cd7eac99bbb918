"""Inject faults into runs with two ranks, and print what each run leaves.

Start it in the root of the repository:

    python -m launch.studies.faults [--only WORD ...] [--keep DIRECTORY]

It needs root, because it mounts small disks, and about ten minutes.

Output: a Markdown table with a row for each fault. It has the seconds from the fault to the end of
the launcher and of all ranks, the code in exit.json, the exit code of the rank that torchrun names
as the root cause, the first line of standard error, and the numbers of processes and of files in
/dev/shm that outlive the run. --keep keeps the run directories.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.studies.faults.injection import Fault, Outcome, inject
from launch.studies.faults.table import FAULTS

_COLUMNS = (
    "fault",
    "seconds to the end",
    "code",
    "torchrun's root cause",
    "first line",
    "processes left",
    "/dev/shm",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of faults")
    parser.add_argument("--keep", type=Path, help="directory to create for the runs")
    options = parser.parse_args()
    print(f"| {' | '.join(_COLUMNS)} |")
    print("|---" * len(_COLUMNS) + "|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            if not options.only or any(word in fault.name for word in options.only):
                name = re.sub("[^A-Za-z0-9]+", "-", fault.name)
                outcome = inject(fault, (options.keep or Path(scratch)) / name)
                print(f"| {' | '.join(cells(fault, outcome))} |", flush=True)


def cells(fault: Fault, outcome: Outcome) -> Iterator[str]:
    """Yield the cells of a row."""
    is_from_start = fault.strike is None or fault.recovers
    yield fault.name
    yield f"{outcome.seconds:.0f}{' (from the start)' if is_from_start else ''}"
    yield "none" if outcome.code is None else str(outcome.code)
    yield "" if outcome.root_cause is None else str(outcome.root_cause)
    yield outcome.first_line[:140].replace("|", "/")
    yield str(len(outcome.survivors))
    yield str(len(outcome.shared_memory))


if __name__ == "__main__":
    main()
