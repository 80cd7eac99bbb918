"""The benchmark's one command, at a size that takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

from tests.kernels.processes import ROOT, importable


def test_one_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--rows", "4", "--vocabulary", "1000", "--repeats", "1", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--operations", "logprob", *arguments],
        cwd=ROOT / "kernels",
        capture_output=True,
        text=True,
        timeout=240,
        env=importable(),
    )
    assert done.returncode == 0, done.stderr
    assert "espo_kernels, in place" in done.stdout
    record = json.loads(output.read_text())
    assert record["copy_gb_s"] > 0
    parts = {(row["part"], row["dtype"]) for row in record["rows"] if row["implementation"] == "espo_kernels"}
    assert parts == {(part, dtype) for part in ("forward", "forward + backward") for dtype in ("float32", "bfloat16")}
    for row in record["rows"]:
        assert row["best_ms"] > 0
        if row["implementation"] == "eager" and row["dtype"] == "float32":
            assert row["max_difference"] < 1e-4
