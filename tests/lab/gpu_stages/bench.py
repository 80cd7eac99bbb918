"""Benchmark of the kernels: times, the share of the bandwidth of a copy, and the goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.lab.gpu_stages.stage import Report, Setting, run

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
_SMALL = ("--device", "cpu", "--repeats", "1", "--rows", "4", "--vocabulary", "1000")
_POLL_S = 1.0
_REPORT_S = 5.0  # seconds that the rest of the stage needs after the benchmark


def bench(setting: Setting, report: Report) -> None:
    """Run `python -m bench`, and note its rows as they come.

    Choices: operations, such as objective. At the limit the benchmark is ended, and the rows that
    it wrote are kept.
    """
    output = setting.scratch / "bench.json"
    process = _start(setting, output)
    is_late = False
    while process.poll() is None and not is_late:
        _sleep_until_it_ends(process)
        _note_rows(_read(output), report)
        is_late = setting.remaining_seconds < _REPORT_S
    if is_late:
        process.kill()
    code = process.wait()
    record = _read(output)
    _note_rows(record, report)
    for name in ("copy_gb_s", "host_peak_gb", "not_measured", "rows"):
        report.note(name, record.get(name))
    report.note("card_peak_gb", max((row["card_gb"] or 0.0 for row in record["rows"]), default=0.0))
    report.require("ended_before_its_limit", not is_late)
    if not is_late:
        report.require("bench_succeeded", code == 0)


def _start(setting: Setting, output: Path) -> subprocess.Popen[bytes]:
    options = list(_SMALL if setting.small else ())
    operations = setting.choices or (("objective",) if setting.small else ())
    if operations:
        options += ["--operations", *operations]
    # A busy CPU would compile for minutes: torch.compile runs what it got.
    environment = os.environ | ({"TORCHDYNAMO_DISABLE": "1"} if setting.small else {})
    command = [sys.executable, "-m", "bench", "--output", str(output), *options]
    return subprocess.Popen(command, cwd=KERNELS, env=environment)


def _sleep_until_it_ends(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return


def _read(output: Path) -> dict[str, Any]:
    """The file, which is complete after each row. It is missing until the benchmark has begun."""
    return json.loads(output.read_text()) if output.exists() else {"rows": []}


def _note_rows(record: dict[str, Any], report: Report) -> None:
    """Note our rows that are not yet noted."""
    for row in record["rows"]:
        name = f"{row['operation']} {row['part']} {row['dtype']}"
        if row["implementation"] != "espo_kernels" or name in report.values:
            continue
        values = {"ms": row["best_ms"], "of_copy": row["share_of_copy"]}
        if row["goal"]:
            values |= {"goal": row["goal"], "is_reached": row["is_reached"]}
        report.note(name, values)


if __name__ == "__main__":
    run(bench)
