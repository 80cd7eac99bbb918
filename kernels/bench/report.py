"""Measured rows as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.peers import versions


@dataclass(frozen=True)
class Row:
    """Results of one implementation in one case.

    share_of_copy: bandwidth as a share of a copy's, timed in alternation; it counts the bytes that
    a perfect implementation moves. extra_peak_ratio: peak memory beyond the inputs, divided by the
    size of the largest input. max_difference: to our result.
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
    times_ours: float
    max_difference: float | None
    note: str


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
    ]
    lines = [header]
    for row in rows:
        peak = "" if row.extra_peak_ratio is None else f"{row.extra_peak_ratio:.2f}"
        numbers = [
            f"{row.best_ms:.3f}",
            f"{row.median_ms:.3f}",
            f"{row.share_of_copy:.0%}",
            peak,
            f"{row.times_ours:.2f}",
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


def write(
    path: Path, device: torch.device, copy_gb_s: float, rows: list[Row], absent: dict[str, str]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        **machine(device),
        "copy_gb_s": round(copy_gb_s, 2),
        "not_measured": absent,
        "rows": [asdict(r) for r in rows],
    }
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


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
