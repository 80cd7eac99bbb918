"""The stage `bench` keeps the rows of a benchmark that does not end, or fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab.gpu_stages import bench as stage
from tests.lab.gpu_stages.stage import Report, Setting

pytestmark = pytest.mark.slow

# Stands in for kernels/bench, which takes a minute: a program that writes a row, and goes on.
PROGRAM = """
import json, sys, time
from pathlib import Path

file = Path(sys.argv[sys.argv.index("--output") + 1])
names = dict(operation="espo_groups", part="grouping", dtype="float32")
ours = dict(implementation="espo_kernels", best_ms=0.12, share_of_copy=0.1, card_gb=3.5)
record = dict(
    copy_gb_s=4000.0,
    host_peak_gb=2.0,
    not_measured={{"TRL": "no module"}},
    rows=[names | ours | dict(goal="≤ 150 µs", is_reached=True)],
    arguments=sys.argv[1:],
)
file.write_text(json.dumps(record))
{ending}
"""
NAME = "espo_groups grouping float32"


def run_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str, **setting: Any
) -> Report:
    """The report of the stage with a benchmark that ends so after its first row."""
    package = tmp_path / "kernels" / "bench"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROGRAM.format(ending=ending))
    monkeypatch.setattr(stage, "KERNELS", package.parent)
    report = Report()
    stage.bench(Setting(False, tmp_path, **setting), report)
    return report


def test_rows_are_kept_when_the_limit_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = time.monotonic()
    report = run_stage(monkeypatch, tmp_path, "time.sleep(100)", limit=12.0)
    assert time.monotonic() - start < 12
    row = {"ms": 0.12, "of_copy": 0.1, "goal": "≤ 150 µs", "is_reached": True}
    assert report.values[NAME] == row
    assert report.problems == ["ended_before_its_limit is false"]
    assert report.values["not_measured"] == {"TRL": "no module"}
    assert (report.values["card_peak_gb"], report.values["host_peak_gb"]) == (3.5, 2.0)


def test_rows_are_noted_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stage that is killed has noted them, even though this file is lost."""
    report = run_stage(monkeypatch, tmp_path, "time.sleep(4); file.unlink()")
    assert report.values[NAME]["ms"] == 0.12


def test_a_benchmark_that_fails_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = run_stage(monkeypatch, tmp_path, "sys.exit(1)")
    assert NAME in report.values
    assert report.problems == ["bench_succeeded is false"]


def test_a_benchmark_that_dies_at_once_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = run_stage(monkeypatch, tmp_path, "file.unlink(); sys.exit(3)")
    assert report.problems == ["bench_succeeded is false"]
    assert report.values["rows"] == []


def test_choices_are_operations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_stage(monkeypatch, tmp_path, "", choices=("objective", "quantize"))
    content = (tmp_path / "bench.json").read_text()
    assert '"--operations", "objective", "quantize"' in content
