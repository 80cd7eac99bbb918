"""Measured rows as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.measure import host_peak_gb
from bench.peers import versions


@dataclass(frozen=True)
class Row:
    """Results of one implementation in one case.

    share_of_copy: bandwidth as a share of a copy's, timed in alternation; it counts the bytes that
    a perfect implementation moves. extra_peak_ratio: peak memory beyond the inputs, divided by the
    size of the largest input. card_gb: the largest memory that torch held on the GPU while it was
    timed, in 10^9 bytes. times_ours: the time divided by ours. max_difference: to our result. goal,
    is_reached: of ours on a GPU.
    """

    operation: str
    part: str
    shape: str
    dtype: str
    implementation: str
    best_ms: float
    median_ms: float
    bytes_moved: int
    share_of_copy: float
    extra_peak_ratio: float | None
    card_gb: float | None
    times_ours: float | None
    max_difference: float | None
    goal: str
    is_reached: bool | None
    note: str

    @property
    def verdict(self) -> str:
        """The goal with the measured number, such as "≤ 50 µs: 47.3 µs, reached"."""
        if self.is_reached is None:
            return ""
        is_time = self.goal.endswith("µs")
        number = f"{self.best_ms * 1e3:.1f} µs" if is_time else f"{self.share_of_copy:.1%}"
        return f"{self.goal}: {number}, {'reached' if self.is_reached else 'missed'}"

    def __str__(self) -> str:
        texts = [
            f"{self.operation} {self.part} {self.dtype} {self.implementation}",
            f"{self.best_ms:.4f} ms, {self.share_of_copy:.1%} of copy",
            self.verdict,
        ]
        return "; ".join(text for text in texts if text)


class Record:
    """The measurements of one run, in a file that is complete after each row."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.copy_gb_s = 0.0
        self.not_measured: dict[str, str] = {}
        self.is_complete = False
        self._path = path
        self._facts = machine(device)
        self._write()

    def add(self, row: Row, copy_bytes_s: float) -> None:
        """Add a row, print it, and write the file."""
        self.rows.append(row)
        self.copy_gb_s = max(self.copy_gb_s, copy_bytes_s / 1e9)
        print(row, flush=True)
        self._write()

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Name what is not measured, with the reasons."""
        self.not_measured |= reasons
        self._write()

    def complete(self) -> None:
        """Say in the file that nothing follows."""
        self.is_complete = True
        self._write()

    def _write(self) -> None:
        """Replace the file at once: a reader, or a killed process, leaves no half of it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            **self._facts,
            "complete": self.is_complete,
            "copy_gb_s": round(self.copy_gb_s, 2),
            "host_peak_gb": round(host_peak_gb(), 2),
            "not_measured": self.not_measured,
            "rows": [asdict(row) for row in self.rows],
        }
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        part.replace(self._path)


def table(rows: list[Row]) -> str:
    """Aligned columns, one line per row."""
    header = [
        "operation",
        "part",
        "shape",
        "dtype",
        "implementation",
        "best ms",
        "median",
        "of copy",
        "peak/in",
        "× ours",
        "goal",
    ]
    lines = [header]
    for row in rows:
        peak = "" if row.extra_peak_ratio is None else f"{row.extra_peak_ratio:.2f}"
        numbers = [
            f"{row.best_ms:.4f}",
            f"{row.median_ms:.4f}",
            f"{row.share_of_copy:.1%}",
            peak,
            "" if row.times_ours is None else f"{row.times_ours:.2f}",
            row.verdict,
        ]
        lines.append([row.operation, row.part, row.shape, row.dtype, row.implementation, *numbers])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and the library versions of a measurement."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **versions()},
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _driver()
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "unknown"
