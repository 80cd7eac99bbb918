"""All that one GPU can prove about this trainer, in at most nine minutes: a table, and JSON beside
it.

    python launch/gpu_check.py            every stage on the first GPU
    python launch/gpu_check.py --small    every stage small, on the CPU

A stage is a process with a time limit; the others go on when one fails. Needs no network, engine or
compiled library of the trainer: docs/gpu.md says what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "launch" / "results" / "gpu_check"
MARK = "GPU-CHECK "  # of the line in which a stage reports: launch/gpu_stages/stage.py
BUDGET_S = 540.0
TAIL_LINES = 40
# Stages in the order of what they tell, with the seconds each may take: later ones get what is left
# of the budget.
STAGES = {
    "machine": 60,
    "attention": 60,
    "parity": 60,
    "kernels": 150,
    "passes": 60,
    "train": 150,
    "state": 60,
    "export": 60,
    "quantize": 40,
    "bench": 90,
    "fp8_training": 90,
    "engine": 180,
}


@dataclass
class Outcome:
    """One stage: passed, failed, skipped or not started; why; what it measured; its last lines when
    it failed.
    """

    stage: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, print the table, write the record. Returns 1 when a stage failed."""
    options = parse(arguments)
    started, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for stage in options.only or STAGES:
            left = options.budget - (time.monotonic() - started)
            print(f"{stage} ...", end=" ", flush=True)
            outcomes.append(
                run_stage(
                    stage, min(STAGES[stage], left), Path(scratch) / stage, small=options.small
                )
            )
            print(
                f"{outcomes[-1].status} after {outcomes[-1].seconds:.0f} s {outcomes[-1].reason}",
                flush=True,
            )
    print("\n".join(table(outcomes)))
    file = write_record(outcomes, options)
    print(f"written: {file}")
    return int(any(outcome.status == "failed" for outcome in outcomes))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--small", action="store_true", help="seconds on the CPU, to see that the program works"
    )
    parser.add_argument("--only", nargs="+", choices=list(STAGES), help="these stages alone")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds for all stages (default 540)"
    )
    parser.add_argument("--out", type=Path, help="JSON file; default in launch/results/gpu_check")
    return parser.parse_args(arguments)


def run_stage(stage: str, limit: float, scratch: Path, *, small: bool) -> Outcome:
    """One stage in a process group of its own, which is ended at its limit with all it started."""
    if limit <= 0:
        return Outcome(stage, "not started", "the budget is spent")
    scratch.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        f"tests.gpu.{stage}",
        "--scratch",
        str(scratch),
        *(["--small"] if small else []),
    ]
    log, start = scratch / "log.txt", time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(small),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        with contextlib.suppress(ProcessLookupError):  # what a stage left behind ends with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    outcome = read_outcome(stage, log.read_text(errors="replace").splitlines(), process.returncode)
    if late:
        outcome.status, outcome.reason = "failed", f"it ran past its limit of {limit:.0f} s"
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def read_outcome(stage: str, lines: list[str], code: int) -> Outcome:
    """What the process said of itself in its last report; without one it failed."""
    said = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if said:
        outcome = Outcome(stage, **json.loads(said[-1]))
    else:
        outcome = Outcome(stage, "failed", f"it ended with code {code} and without a report")
    if outcome.status == "failed":
        outcome.tail = [line for line in lines if not line.startswith(MARK)][-TAIL_LINES:]
    return outcome


def environment(small: bool) -> dict[str, str]:
    """This tree first on the path, one GPU (small: none), and no network."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": "" if small else first,
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for the stages that ask for deterministic products
        "PYTHONWARNINGS": "ignore",
        **({"OMP_NUM_THREADS": "1"} if small else {}),
    }


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each stage, and what it measured below it."""
    lines = [f"{'stage':<12}{'result':<13}{'seconds':>8}  "]
    for outcome in outcomes:
        lines.append(
            f"{outcome.stage:<12}{outcome.status:<13}{outcome.seconds:>8.1f}  {outcome.reason}".rstrip()
        )
        lines += [
            f"{'':<12}{name} = {value}"
            for name, value in outcome.values.items()
            if not isinstance(value, list)
        ]
    return lines


def write_record(outcomes: Sequence[Outcome], options: argparse.Namespace) -> Path:
    """The JSON file: date, device and versions, then every stage."""
    now = datetime.now(UTC)
    machine: dict[str, Any] = next(
        (outcome.values for outcome in outcomes if outcome.stage == "machine"), {}
    )
    device = re.sub(r"\W+", "-", str(machine.get("device") or "unknown")).strip("-").lower()
    name = f"{'small-' if options.small else ''}{device}-{now:%Y-%m-%d-%H%M}.json"
    file: Path = options.out or RESULTS / name
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {"date": now.isoformat(timespec="seconds"), "small": options.small, "machine": machine}
    file.write_text(
        json.dumps(record | {"stages": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n"
    )
    return file


if __name__ == "__main__":
    sys.exit(main())
