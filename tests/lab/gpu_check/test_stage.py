"""A stage prints its values as they come, and its result last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.gpu_stages.stage import MARK
from tests.support.scripts import ROOT

pytestmark = pytest.mark.slow

HEAD = """import errno, os, sys, time
from tests.lab.gpu_stages.stage import Report, StageSkipped, run
"""


def run_stage(tmp_path: Path, body: str, *choices: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a stage with this body; returns its exit code and its report lines."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    script = tmp_path / "stage.py"
    script.write_text(f"{HEAD}def stage(setting, report):\n{lines}\nrun(stage)\n")
    process = subprocess.run(
        [sys.executable, str(script), "--scratch", str(tmp_path), *choices],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines_of_report = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    return process.returncode, [json.loads(line.removeprefix(MARK)) for line in lines_of_report]


def test_a_value_is_printed_before_the_stage_ends(tmp_path: Path) -> None:
    body = "report.note('a', 1)\nreport.require('b', False)\nos._exit(9)"
    code, records = run_stage(tmp_path, body)
    assert code == 9
    assert records == [{"values": {"a": 1}}, {"values": {"b": False}}, {"problem": "b is false"}]


def test_the_last_line_holds_the_result_and_all_values(tmp_path: Path) -> None:
    body = "report.note('a', 1)\nreport.require_at_most('b', 2.0, 1.0)\nraise ValueError('c')"
    code, records = run_stage(tmp_path, body)
    assert code == 1
    assert records[-1]["values"] == {"a": 1, "b": 2.0}
    assert records[-1]["status"] == "failed"
    assert records[-1]["reason"] == "b is 2, the limit is 1; ValueError: c"


def test_parts_after_one_that_fails_run(tmp_path: Path) -> None:
    body = (
        "with report.part('first'):\n    raise ValueError('a')\n"
        "with report.part('second'):\n    raise StageSkipped('b')\n"
        "report.note('third', 3)"
    )
    code, records = run_stage(tmp_path, body)
    assert code == 1
    assert records[-1]["reason"] == "first: ValueError: a"
    assert records[-1]["values"] == {"second": "skipped: b", "third": 3}


def test_a_stage_gets_its_choices(tmp_path: Path) -> None:
    _, records = run_stage(tmp_path, "report.note('choices', setting.choices)", "one", "two")
    assert records[-1]["values"] == {"choices": ["one", "two"]}
    assert records[-1]["status"] == "passed"


def test_numbers_that_json_lacks_become_texts(tmp_path: Path) -> None:
    _, records = run_stage(tmp_path, "report.require_at_most('a', float('nan'), 1.0)")
    assert records[0] == {"values": {"a": "nan"}}
    assert records[-1]["status"] == "failed"


@pytest.mark.parametrize(
    "error",
    [
        "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'weights')",
        "RuntimeError('SafetensorError: I/O error: No space left on device (os error 28)')",
    ],
)
def test_a_full_disk_skips_the_stage(tmp_path: Path, error: str) -> None:
    """A full disk says nothing about the GPU."""
    code, records = run_stage(tmp_path, f"raise {error}")
    assert (code, records[-1]["status"]) == (0, "skipped")
    assert "no space left on device" in records[-1]["reason"] and "TMPDIR" in records[-1]["reason"]


def test_a_full_disk_does_not_hide_a_problem(tmp_path: Path) -> None:
    body = "report.require('right', False)\nraise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"
    code, records = run_stage(tmp_path, body)
    assert (code, records[-1]["status"]) == (1, "failed")
    assert "right is false; no space left" in records[-1]["reason"]
