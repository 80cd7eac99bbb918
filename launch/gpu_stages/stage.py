"""What the stages of `launch/gpu_check.py` share: their arguments, and the one line in which each
reports.
"""

from __future__ import annotations

import argparse
import json
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "GPU-CHECK "


class Skipped(Exception):
    """What a stage is about is not on this machine; the text says what."""


@dataclass(frozen=True)
class Setting:
    """small: seconds on a CPU instead of what a GPU can hold. scratch: a directory of the stage's
    own.
    """

    small: bool
    scratch: Path


@dataclass
class Report:
    """What a stage measured, and what of it is wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, name: str, value: Any) -> None:
        self.values[name] = value

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Note a number that is wrong above `limit`, or when it is not finite."""
        self.note(name, value)
        if not (math.isfinite(value) and value <= limit):
            self.problems.append(f"{name} is {value:.3g}, at most {limit:.3g} is right")

    def holds(self, name: str, value: bool) -> None:
        """Note what has to be true."""
        self.note(name, value)
        if not value:
            self.problems.append(f"{name} is false")


def run(stage: Callable[[Setting, Report], None]) -> None:
    """A stage's process: run it, print its report as the last line and exit with 1 when something
    is wrong.
    """
    parser = argparse.ArgumentParser(description=stage.__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    report, status, reason = Report(), "passed", ""
    try:
        stage(Setting(arguments.small, arguments.scratch), report)
        if report.problems:
            status, reason = "failed", "; ".join(report.problems)
    except Skipped as skipped:
        status, reason = "skipped", str(skipped)
    except Exception as error:
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    print(
        MARK + json.dumps({"status": status, "reason": reason, "values": report.values}), flush=True
    )
    raise SystemExit(status == "failed")
