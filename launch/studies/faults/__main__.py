"""The table of faults: what a run with two ranks does when something happens to it.

PYTHONPATH=.:tests python launch/studies/faults/__main__.py [--only WORD ...] [--keep DIRECTORY]

It needs root for the small disks it mounts, and about ten minutes.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.studies.faults.injection import FAULTS, Fault, Outcome, suffer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="words of the faults' names")
    parser.add_argument("--keep", type=Path, help="a directory for what each run leaves")
    options = parser.parse_args()
    print(
        "| fault | seconds to the end | code | torchrun's root cause | first line | processes left | /dev/shm |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            if not options.only or any(word in fault.name for word in options.only):
                directory = (options.keep or Path(scratch)) / re.sub(
                    "[^A-Za-z0-9]+", "-", fault.name
                )
                outcome = suffer(fault, directory)
                print("| " + " | ".join(row(fault, outcome)) + " |", flush=True)


def row(fault: Fault, outcome: Outcome) -> Iterator[str]:
    yield fault.name
    yield f"{outcome.seconds:.0f}" + (
        " (from the start)" if fault.strike is None or fault.recovers else ""
    )
    yield "none" if outcome.code is None else str(outcome.code)
    yield "" if outcome.root_cause is None else str(outcome.root_cause)
    yield outcome.first_line[:140].replace("|", "/")
    yield str(len(outcome.left))
    yield str(len(outcome.shared_memory))


if __name__ == "__main__":
    main()
