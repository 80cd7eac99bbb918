"""The benchmark command with its smallest inputs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.processes import ROOT, importable

pytestmark = pytest.mark.slow


def run_bench(output: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run `python -m bench`; its output, and the record that it writes."""
    process = subprocess.run(
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
    assert process.returncode == 0, process.stderr
    record = json.loads(output.read_text())
    assert record["copy_gb_s"] > 0
    assert all(row["best_ms"] > 0 for row in record["rows"])
    return process.stdout, record


def test_one_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    output, record = run_bench(tmp_path / "result.json", "--operations", "objective")
    assert "loss + gradient" in output
    assert [(row["part"], row["implementation"]) for row in record["rows"]] == [
        ("grouping", "espo_kernels"),
        ("grouping", "reference"),
        ("loss + gradient", "espo_kernels"),
        ("loss + gradient", "eager"),
    ]
    assert record["rows"][-1]["max_difference"] < 1e-4


@pytest.mark.nightly
def test_bench_compares_logprobs_with_eager_torch(tmp_path: Path) -> None:
    arguments = ["--operations", "logprob", "--rows", "4", "--vocabulary", "1000"]
    output, record = run_bench(tmp_path / "result.json", *arguments)
    assert "espo_kernels, in place" in output
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
