"""The result of a stage, read from the lines that it prints."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from typing import Any

MARK = "GPU-CHECK "  # begins a report line of a stage, as in tests/lab/gpu_stages/stage.py
TAIL_LINES = 40


@dataclass
class Outcome:
    """Result of one stage.

    status: passed, failed, skipped, cut off, running or not started. A stage is cut off if the
    budget or the command ended before the stage's own limit, which says nothing about the GPU.
    reason: the reason of any status but passed; then only a crash after the last report.
    values: measurements, which a stage that did not end has, too.
    tail: the last lines of the output of a failed stage.
    """

    stage: str
    status: str = "not started"
    reason: str = ""
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


class OutputReader:
    """Reads the output of a stage as it comes, and keeps its reports.

    outcome: receives the values.
    """

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._problems: list[str] = []
        self._has_result = False

    def add(self, data: bytes) -> None:
        """Add bytes of the output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._add_line(line.decode(errors="replace"))

    def finish(self, code: int, interruption: tuple[str, str] | None) -> None:
        """Complete the outcome of a process that ended.

        code: its exit code. interruption: status and reason if it was killed.
        """
        if self._rest:
            self.add(b"\n")
        outcome = self._outcome
        if interruption is not None:
            outcome.status, reason = interruption
            outcome.reason = "; ".join([*self._problems, reason])
            if self._problems:
                outcome.status = "failed"
        elif not self._has_result:
            outcome.status = "failed"
            ending = f"it ended with code {code} and without a report"
            outcome.reason = "; ".join([*self._problems, ending])
        elif code not in (0, 1):
            ending = f"it ended with code {code} after its report"
            outcome.reason = "; ".join([*filter(None, [outcome.reason]), ending])
        if outcome.status in ("failed", "cut off"):
            outcome.tail = list(self._lines)

    def _add_line(self, line: str) -> None:
        before, mark, text = line.partition(MARK)
        record = _parse(text) if mark else None
        if record is None:
            self._lines.append(line)
            return
        if before:  # another process of the stage did not end its line
            self._lines.append(before)
        self._outcome.values |= record.get("values", {})
        if "problem" in record:
            self._problems.append(record["problem"])
        if "status" in record:
            self._outcome.status = record["status"]
            self._outcome.reason = record["reason"]
            self._has_result = True


def _parse(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
