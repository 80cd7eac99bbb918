"""The benchmark's one command, at its smallest."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.processes import ROOT, importable


def measured(output: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What `python -m bench` prints, and the record it writes."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench",
            "--device",
            "cpu",
            "--repeats",
            "1",
            "--output",
            str(output),
            *arguments,
        ],
        cwd=ROOT / "kernels",
        capture_output=True,
        text=True,
        timeout=240,
        env=importable(),
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert record["copy_gb_s"] > 0
    assert all(row["best_ms"] > 0 for row in record["rows"])
    return done.stdout, record


def test_one_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    printed, record = measured(tmp_path / "result.json", "--operations", "objective")
    assert "loss + gradient" in printed
    assert [(row["part"], row["implementation"]) for row in record["rows"]] == [
        ("grouping", "espo_kernels"),
        ("grouping", "reference"),
        ("loss + gradient", "espo_kernels"),
        ("loss + gradient", "eager"),
    ]
    assert record["rows"][-1]["max_difference"] < 1e-4


@pytest.mark.slow
def test_logprobs_are_measured_beside_those_of_eager_torch(tmp_path: Path) -> None:
    arguments = ["--operations", "logprob", "--rows", "4", "--vocabulary", "1000"]
    printed, record = measured(tmp_path / "result.json", *arguments)
    assert "espo_kernels, in place" in printed
    parts = {
        (row["part"], row["dtype"])
        for row in record["rows"]
        if row["implementation"] == "espo_kernels"
    }
    assert parts == {
        (part, dtype)
        for part in ("forward", "forward + backward")
        for dtype in ("float32", "bfloat16")
    }
    eager = [
        r for r in record["rows"] if r["implementation"] == "eager" and r["dtype"] == "float32"
    ]
    assert eager and all(row["max_difference"] < 1e-4 for row in eager)
