"""Inject faults into runs, and print what each run does and leaves.

Start it in the root of the repository:

    python -m tests.lab.faults [outlived|ending] [--only WORD ...] [--keep DIRECTORY]

outlived: faults of engines and collectors, which a run outlives. A row has the seconds from the
fault to the record of the first step that began after it, and the same without the start of an
engine if the run waited for one; what the undisturbed run has and this one lacks (lost) or trained
twice (doubled); and whether the final weights have the same SHA-256. Faults of one session strike
one run, one after another.

ending: faults of ranks and disks, which end a run. It needs root, because it mounts small disks. A
row has the seconds from the fault to the end of the launcher and of all ranks, the code in
exit.json, the exit code of the rank that torchrun names as the root cause, the first line of
standard error, and the numbers of processes and of files in /dev/shm that outlive the run.

Output: the table of the kind, without one both tables. --keep keeps the run directories.
"""

import argparse
import re
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.lab.faults.injection import Fault, inject
from tests.lab.faults.injection import Outcome as Ending
from tests.lab.faults.recovery import Laboratory, Outcome, Row, Session
from tests.lab.faults.recovery_table import chosen_sessions
from tests.lab.faults.servers import ServerPark
from tests.lab.faults.table import FAULTS

_OUTLIVED_COLUMNS = (
    "session",
    "fault",
    "goes on after",
    "without an engine's start",
    "lost",
    "doubled",
    "repeated requests",
    "weights",
    "last line about it",
)
_ENDING_COLUMNS = (
    "fault",
    "seconds to the end",
    "code",
    "torchrun's root cause",
    "first line",
    "processes left",
    "/dev/shm",
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", nargs="?", choices=("outlived", "ending"))
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of faults")
    parser.add_argument("--keep", type=Path, help="directory to create for the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = (options.keep or Path(scratch)).resolve()
        if options.kind != "ending":
            print_outlived(list(chosen_sessions(options.only)), directory)
        if options.kind != "outlived":
            print_ending(options.only, directory)


def print_outlived(sessions: list[Session], directory: Path) -> None:
    """Print the table of faults that runs outlive. A session that fails has a row too."""
    _print_head(_OUTLIVED_COLUMNS)
    park = ServerPark(directory / "servers")
    try:
        laboratory = Laboratory(directory, park)
        for session in sessions:
            try:
                outcome = laboratory.run(session)
            except (AssertionError, OSError) as error:
                (directory / f"{session.name}.txt").write_text(traceback.format_exc())
                reason = str(error).partition("\n")[0]
                _print_row([session.name, "FAILED", *[""] * 6, reason.replace("|", "/")])
                continue
            for row in outcome.rows:
                _print_row(outlived_cells(session, row, outcome))
    finally:
        park.close()


def print_ending(words: list[str], directory: Path) -> None:
    """Print the table of faults that end runs."""
    _print_head(_ENDING_COLUMNS)
    for fault in FAULTS:
        if not words or any(word in fault.name for word in words):
            name = re.sub("[^A-Za-z0-9]+", "-", fault.name)
            _print_row(ending_cells(fault, inject(fault, directory / name)))


def outlived_cells(session: Session, row: Row, outcome: Outcome) -> Iterator[str]:
    """Yield the cells of a fault that a run outlives."""
    yield session.name
    yield row.fault
    yield f"{row.seconds:.0f} s"
    yield f"{row.net_seconds:.0f} s"
    yield str(outcome.num_lost)
    yield str(outcome.evidence.num_doubled)
    yield str(outcome.evidence.num_repeated)
    yield "same" if outcome.has_same_weights else "OTHER"
    yield re.sub(r"http://[\d.:]+", "URL", row.line)[:110].replace("|", "/")


def ending_cells(fault: Fault, outcome: Ending) -> Iterator[str]:
    """Yield the cells of a fault that ends a run."""
    is_from_start = fault.strike is None or fault.recovers
    yield fault.name
    yield f"{outcome.seconds:.0f}{' (from the start)' if is_from_start else ''}"
    yield "none" if outcome.code is None else str(outcome.code)
    yield "" if outcome.root_cause is None else str(outcome.root_cause)
    yield outcome.first_line[:140].replace("|", "/")
    yield str(len(outcome.survivors))
    yield str(len(outcome.shared_memory))


def _print_head(columns: tuple[str, ...]) -> None:
    _print_row(columns)
    print("|---" * len(columns) + "|", flush=True)


def _print_row(cells: Iterator[str] | tuple[str, ...] | list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
