"""Check on one GPU what this trainer needs of it, in at most nine minutes.

Examples:

    python launch/gpu_check.py            every stage on the first GPU
    python launch/gpu_check.py --small    every stage small, on the CPU
    python launch/gpu_check.py --small --only kernels
    python launch/gpu_check.py --pretended      small stages on a CUDA device in the CPU's memory

A stage is a process with a time limit, and the others run when one fails. It needs no network,
engine or compiled library of the trainer: docs/gpu.md lists its requirements.

Outputs: a table of the stages and their measurements, and a JSON file in launch/results/gpu_check.
Exit code: 0, or 1 if a stage failed.
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
MARK = "GPU-CHECK "  # begins the report line of a stage, as in launch/gpu_stages/stage.py
BUDGET_S = 540.0
TAIL_LINES = 40
# Limits in seconds. The most informative stages come first, and later ones get the rest of the
# budget.
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
# Why a stage cannot run on launch/pretended_device
NOT_PRETENDED = {
    "machine": "it describes a GPU",
    "kernels": "Triton compiles its kernels for a GPU",
    "bench": "it measures a GPU",
    "fp8_training": "Transformer Engine needs a GPU",
    "engine": "SGLang needs a GPU",
}


@dataclass
class Outcome:
    """Result of one stage.

    status: passed, failed, skipped or not started.
    reason: the reason of any status but passed.
    values: measurements.
    tail: the last lines of the output of a failed stage.
    """

    stage: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, print the table, write the JSON file. Returns 1 if a stage failed."""
    options = parse_arguments(arguments)
    start = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for stage in options.only or STAGES:
            remaining = options.budget - (time.monotonic() - start)
            print(f"{stage} ...", end=" ", flush=True)
            # On a pretended device nothing is measured, and the CPU does a GPU's work
            limit = min(STAGES[stage] * (4 if options.pretended else 1), remaining)
            if options.pretended and stage in NOT_PRETENDED:
                outcome = Outcome(stage, "skipped", NOT_PRETENDED[stage])
            else:
                outcome = run_stage(
                    stage,
                    limit,
                    Path(scratch) / stage,
                    small=options.small,
                    on_pretended=options.pretended,
                )
            outcomes.append(outcome)
            print(f"{outcome.status} after {outcome.seconds:.0f} s {outcome.reason}", flush=True)
    print("\n".join(table(outcomes)))
    file = write_record(outcomes, options)
    print(f"written: {file}")
    return int(any(outcome.status == "failed" for outcome in outcomes))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--small", action="store_true", help="run small stages on the CPU")
    parser.add_argument(
        "--pretended", action="store_true", help="run small stages on launch/pretended_device"
    )
    parser.add_argument("--only", nargs="+", choices=list(STAGES), help="run these stages only")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds for all stages (default: 540)"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: a new file in launch/results/gpu_check)"
    )
    options = parser.parse_args(arguments)
    options.small |= options.pretended
    return options


def run_stage(
    stage: str, limit: float, scratch: Path, *, small: bool, on_pretended: bool = False
) -> Outcome:
    """Run one stage in its own process group, which is killed at the limit in seconds."""
    if limit <= 0:
        return Outcome(stage, "not started", "the budget is spent")
    scratch.mkdir(parents=True)
    options = ["--scratch", str(scratch), "--limit", str(limit), *(["--small"] if small else [])]
    module = f"launch.gpu_stages.{stage}"
    pretend = ["-m", "launch.pretended_device"] if on_pretended else ["-m"]
    command = [sys.executable, *pretend, module, *options]
    log = scratch / "log.txt"
    start = time.monotonic()
    is_late = False
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
        except subprocess.TimeoutExpired:
            is_late = True
        # Processes that the stage started end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    outcome = read_outcome(stage, log.read_text(errors="replace").splitlines(), process.returncode)
    if is_late:
        outcome.status = "failed"
        outcome.reason = f"it exceeded its limit of {limit:.0f} s"
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def read_outcome(stage: str, lines: list[str], code: int) -> Outcome:
    """Read the last report of a stage. Without a report it failed.

    lines: output of the process. code: exit code of the process.
    """
    reports = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if reports:
        outcome = Outcome(stage, **json.loads(reports[-1]))
    else:
        outcome = Outcome(stage, "failed", f"it ended with code {code} and without a report")
    if outcome.status == "failed":
        outcome.tail = [line for line in lines if not line.startswith(MARK)][-TAIL_LINES:]
    return outcome


def environment(small: bool) -> dict[str, str]:
    """Environment of a stage: this tree first on the path, at most one GPU, and no network."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": "" if small else first,
        "HF_HUB_OFFLINE": "1",
        # Stages with deterministic algorithms need it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONWARNINGS": "ignore",
        **({"OMP_NUM_THREADS": "1"} if small else {}),
    }


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines of the table: one for each stage, and its measurements below it."""
    lines = [f"{'stage':<12}{'result':<13}{'seconds':>8}  "]
    for outcome in outcomes:
        columns = f"{outcome.stage:<12}{outcome.status:<13}{outcome.seconds:>8.1f}"
        lines.append(f"{columns}  {outcome.reason}".rstrip())
        for name, value in outcome.values.items():
            if not isinstance(value, list):
                lines.append(f"{'':<12}{name} = {value}")
    return lines


def write_record(outcomes: Sequence[Outcome], options: argparse.Namespace) -> Path:
    """Write the JSON file: date, device and versions, then every stage. Returns its path."""
    now = datetime.now(UTC)
    machine: dict[str, Any] = next(
        (outcome.values for outcome in outcomes if outcome.stage == "machine"), {}
    )
    device = re.sub(r"\W+", "-", str(machine.get("device") or "unknown")).strip("-").lower()
    kind = "pretended-" if options.pretended else "small-" if options.small else ""
    name = f"{kind}{device}-{now:%Y-%m-%d-%H%M}.json"
    file: Path = options.out or RESULTS / name
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {"date": now.isoformat(timespec="seconds"), "small": options.small, "machine": machine}
    file.write_text(
        json.dumps(record | {"stages": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n"
    )
    return file


if __name__ == "__main__":
    sys.exit(main())
