"""Shared parts of the stages of `tests/lab/gpu_check`: the command line and the report lines.

A stage prints a line for each value as soon as it has it, so that a stage that is killed keeps its
values. The last line holds the result.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "GPU-CHECK "
_MAX_REASON_LENGTH = 300
_FULL_DISK = "No space left on device"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


class StageSkipped(Exception):
    """The machine lacks what the stage checks. The text names it."""


@dataclass(frozen=True)
class Setting:
    """Setting of a stage.

    small: True for seconds on a CPU, False for the size of a GPU.
    scratch: an empty directory of this stage.
    choices: what the stage runs, among its own choices; empty for its default.
    limit: seconds after which the stage is killed. start: time of its start, on the monotonic
    clock.
    """

    small: bool
    scratch: Path
    choices: tuple[str, ...] = ()
    limit: float = math.inf
    start: float = field(default_factory=time.monotonic)

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the stage is killed."""
        return max(0.0, self.start + self.limit - time.monotonic())

    def longest_wait(self, *, then: float) -> float:
        """Return the seconds that one wait may take, so that its error comes before the limit.

        then: seconds that the rest of the stage needs after it.
        """
        return max(self.remaining_seconds / 2, self.remaining_seconds - then)


@dataclass
class Report:
    """Measurements of a stage, and the problems among them. Each is printed as it comes."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, name: str, value: Any) -> None:
        """Record a measurement that JSON can hold. NaN and infinities become texts."""
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        self.values[name] = value
        _print_line({"values": {name: value}})

    def require_at_most(self, name: str, value: float, limit: float) -> None:
        """Record a number, which must be finite and at most `limit`."""
        self.note(name, value)
        if not (math.isfinite(value) and value <= limit):
            self._add_problem(f"{name} is {value:.3g}, the limit is {limit:.3g}")

    def require(self, name: str, value: bool) -> None:
        """Record a condition, which must be true."""
        self.note(name, value)
        if not value:
            self._add_problem(f"{name} is false")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of a stage. Its error is a problem of the stage, and other parts go on."""
        try:
            yield
        except StageSkipped as skip:
            self.note(name, f"skipped: {skip}")
        except Exception as error:
            traceback.print_exc()
            status, reason = _judge(error)
            if status == "failed":
                self._add_problem(f"{name}: {reason}")
            else:
                self.note(name, f"skipped: {reason}")

    def _add_problem(self, text: str) -> None:
        self.problems.append(text)
        _print_line({"problem": text})


def run(stage: Callable[[Setting, Report], None]) -> None:
    """Run a stage as a program and exit, with 1 after a failure. The result is the last line."""
    # Without this, a stage that holds the GPU would outlive a killed `gpu_check`.
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    parser = argparse.ArgumentParser(description=stage.__doc__)
    parser.add_argument("--small", action="store_true", help="seconds on a CPU")
    parser.add_argument("--scratch", type=Path, required=True, help="an empty directory")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds until the stage is killed"
    )
    parser.add_argument("choices", nargs="*", help="what to run, among the stage's choices")
    options = parser.parse_args()
    report = Report()
    status = "passed"
    reason = ""
    try:
        stage(
            Setting(options.small, options.scratch, tuple(options.choices), options.limit), report
        )
    except StageSkipped as skip:
        status = "skipped"
        reason = str(skip)
    except Exception as error:
        traceback.print_exc()
        status, reason = _judge(error)
    if report.problems:
        status = "failed"
        reason = "; ".join([*report.problems, *filter(None, [reason])])
    _print_line({"status": status, "reason": reason, "values": report.values})
    raise SystemExit(status == "failed")


def _judge(error: Exception) -> tuple[str, str]:
    """Return the status and the reason of a stage that raised an error.

    A full disk says nothing about the GPU. Libraries raise errors of their own for it.
    """
    if _FULL_DISK in str(error):
        return "skipped", "no space left on device: set TMPDIR to a larger one"
    first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
    return "failed", first_line[:_MAX_REASON_LENGTH]


def _print_line(record: dict[str, Any]) -> None:
    print(MARK + json.dumps(record), flush=True)
