"""Shared parts of the stages of `launch/gpu_check.py`: the command line and the report line."""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "GPU-CHECK "
_MAX_REASON_LENGTH = 300


class StageSkipped(Exception):
    """The machine lacks what the stage checks. The text names it."""


@dataclass(frozen=True)
class Setting:
    """Setting of a stage.

    small: True for seconds on a CPU, False for the size of a GPU.
    scratch: an empty directory of this stage.
    limit: seconds after which the stage is killed. start: time of its start, on the monotonic
    clock.
    """

    small: bool
    scratch: Path
    limit: float = math.inf
    start: float = field(default_factory=time.monotonic)

    def longest_wait(self, *, then: float) -> float:
        """Return the seconds that one wait may take, so that its error comes before the limit.

        then: seconds that the rest of the stage needs after it.
        """
        remaining_seconds = max(0.0, self.start + self.limit - time.monotonic())
        return max(remaining_seconds / 2, remaining_seconds - then)


@dataclass
class Report:
    """Measurements of a stage, and the problems among them."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, name: str, value: Any) -> None:
        """Record a measurement."""
        self.values[name] = value

    def require_at_most(self, name: str, value: float, limit: float) -> None:
        """Record a number, which must be finite and at most `limit`."""
        self.note(name, value)
        if not (math.isfinite(value) and value <= limit):
            self.problems.append(f"{name} is {value:.3g}, the limit is {limit:.3g}")

    def require(self, name: str, value: bool) -> None:
        """Record a condition, which must be true."""
        self.note(name, value)
        if not value:
            self.problems.append(f"{name} is false")


def run(stage: Callable[[Setting, Report], None]) -> None:
    """Run a stage as a program and exit, with 1 after a failure. The report is the last line."""
    parser = argparse.ArgumentParser(description=stage.__doc__)
    parser.add_argument("--small", action="store_true", help="seconds on a CPU")
    parser.add_argument("--scratch", type=Path, required=True, help="an empty directory")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds until the stage is killed"
    )
    options = parser.parse_args()
    report = Report()
    status = "passed"
    reason = ""
    try:
        stage(Setting(options.small, options.scratch, options.limit), report)
        if report.problems:
            status = "failed"
            reason = "; ".join(report.problems)
    except StageSkipped as skip:
        status = "skipped"
        reason = str(skip)
    except Exception as error:
        traceback.print_exc()
        status = "failed"
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        reason = first_line[:_MAX_REASON_LENGTH]
    record = {"status": status, "reason": reason, "values": report.values}
    print(MARK + json.dumps(record), flush=True)
    raise SystemExit(status == "failed")
