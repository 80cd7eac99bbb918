"""Benchmark of the kernels: times, and the share of the bandwidth of a copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from launch.gpu_stages.stage import Report, Setting, run

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
_SMALL = ("--device", "cpu", "--operations", "objective", "--repeats", "1")


def bench(setting: Setting, report: Report) -> None:
    """Run `python -m bench` and note its rows."""
    output = setting.scratch / "bench.json"
    options = _SMALL if setting.small else ()
    command = [sys.executable, "-m", "bench", "--output", str(output), *options]
    process = subprocess.run(command, cwd=KERNELS, capture_output=True, text=True)
    print(process.stdout, process.stderr[-4_000:])
    report.require("bench_succeeded", process.returncode == 0)
    if process.returncode:
        return
    record = json.loads(output.read_text())
    report.note("copy_gb_s", round(record["copy_gb_s"], 1))
    for row in record["rows"]:
        if row["implementation"] == "espo_kernels":
            name = f"{row['operation']} {row['part']} {row['dtype']}"
            report.note(name, {"ms": row["best_ms"], "of_copy": row["share_of_copy"]})
    report.note("rows", record["rows"])


if __name__ == "__main__":
    run(bench)
