"""`launch/gpu_check.py` runs on a CPU, continues after a failed stage, and names the failure."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import gpu_check
from launch.gpu_stages.stage import Setting
from tests.gpu.bare_machine import bundle_names, closure, normalize, write_blocker
from tests.support.scripts import ROOT, start_script

WITHOUT_ENGINE = (
    "machine",
    "attention",
    "parity",
    "kernels",
    "passes",
    "train",
    "state",
    "export",
    "quantize",
    "bench",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stage_runs_small_on_a_bare_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only packages that a GPU machine without network has can be imported.

    The engine is left out (tests/engine checks its parts), and no CPU runs FP8 training.
    """
    write_blocker(tmp_path / "bare", extra=("numba", "llvmlite"))  # for the kernels on CPUs
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bare"))
    assert {*WITHOUT_ENGINE, "fp8_training", "engine"} == set(gpu_check.STAGES)
    out = tmp_path / "result.json"
    script = str(ROOT / "launch/gpu_check.py")
    options = ["--small", "--out", str(out), "--only", *WITHOUT_ENGINE, "fp8_training"]
    process = subprocess.run(
        [sys.executable, script, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads(out.read_text())
    check_record(record)
    failures = {s["stage"]: s["tail"] for s in record["stages"] if s["status"] == "failed"}
    assert process.returncode == 0, json.dumps(failures, indent=1)
    for text in ("stage", "replay_cost", f"written: {out}"):
        assert text in process.stdout


def check_record(record: dict[str, Any]) -> None:
    stages = {stage["stage"]: stage for stage in record["stages"]}
    exceptions = {name: s["status"] for name, s in stages.items() if s["status"] != "passed"}
    assert exceptions == {"fp8_training": "skipped"}, record
    assert record["small"] and record["date"] and record["machine"]["torch"]
    assert stages["train"]["values"]["replayed_tokens_s"] > 0
    assert stages["kernels"]["values"]["passed"] > 0
    assert stages["machine"]["values"]["imports"] == [], "SGLang is hidden"


def write_stage(root: Path, name: str, body: str) -> None:
    folder = root / "launch" / "gpu_stages"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(body)


def report(**values: object) -> str:
    record = json.dumps({"status": "passed", "reason": "", "values": values})
    return f"print('GPU-CHECK ' + {json.dumps(record)})\n"


def test_other_stages_run_after_one_fails_hangs_or_dies(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_stage(tmp_path, "machine", report(device="Some GPU (tm)", torch="9"))
    write_stage(tmp_path, "dies", "print('a line before')\nimport os\nos.kill(os.getpid(), 11)\n")
    write_stage(
        tmp_path,
        "hangs",
        report(half="way") + "import sys, time\nsys.stdout.flush()\ntime.sleep(60)\n",
    )
    write_stage(tmp_path, "last", report(number=1.5))
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "STAGES", {"machine": 60, "dies": 60, "hangs": 6, "last": 60})
    start = time.monotonic()
    assert gpu_check.main(["--out", str(tmp_path / "out.json")]) == 1
    assert time.monotonic() - start < 50
    stages = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert [stage["status"] for stage in stages] == ["passed", "failed", "failed", "passed"]
    assert stages[1]["reason"] == "it ended with code -11 and without a report"
    assert stages[1]["tail"] == ["a line before"]
    assert stages[2]["reason"] == "it exceeded its limit of 6 s"
    assert stages[2]["values"] == {"half": "way"}
    output = capsys.readouterr().out
    assert re.search(r"^last +passed +\d", output, flags=re.MULTILINE)
    assert "number = 1.5" in output


def test_a_stage_knows_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = (
        "import json, sys\nreport = {'status': 'passed', 'reason': '', 'values': {'a': sys.argv}}"
    )
    write_stage(tmp_path, "first", body + "\nprint('GPU-CHECK ' + json.dumps(report))\n")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    outcome = gpu_check.run_stage("first", 40.0, tmp_path / "scratch", small=True)
    arguments = outcome.values["a"]
    assert arguments[arguments.index("--limit") + 1] == "40.0"


@pytest.mark.parametrize("limit", [180.0, 60.0, 10.0])
def test_waits_of_a_stage_end_before_its_limit(tmp_path: Path, limit: float) -> None:
    """Their errors name what was waited for. At its limit, a stage is killed without a word."""
    setting = Setting(True, tmp_path, limit=limit)
    longest = setting.longest_wait(then=45.0)
    assert 0 < longest < limit - 4
    assert limit < 100 or longest == pytest.approx(limit - 45, abs=1)
    late = dataclasses.replace(setting, start=time.monotonic() - limit / 2)
    assert late.longest_wait(then=45.0) <= limit / 2


def test_stages_beyond_the_budget_are_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_stage(tmp_path, "first", "import time\ntime.sleep(2)\n" + report())
    write_stage(tmp_path, "second", report())
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "STAGES", {"first": 60, "second": 60})
    gpu_check.main(["--out", str(tmp_path / "out.json"), "--budget", "1.5"])
    stages = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert [stage["status"] for stage in stages] == ["failed", "not started"]


def test_a_result_has_the_device_in_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path)
    outcomes = [gpu_check.Outcome("machine", "passed", values={"device": "NVIDIA H200 (80GB)"})]
    file = gpu_check.write_record(
        outcomes, gpu_check.argparse.Namespace(small=False, pretended=False, out=None)
    )
    assert re.fullmatch(r"nvidia-h200-80gb-\d{4}-\d\d-\d\d-\d{4}\.json", file.name)


def test_a_stage_sees_one_gpu_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpu_check.environment(False)["CUDA_VISIBLE_DEVICES"] == "3"
    assert gpu_check.environment(True)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_check.environment(False)["CUDA_VISIBLE_DEVICES"] == "0"
    assert gpu_check.environment(False)["HF_HUB_OFFLINE"] == "1"


def test_a_stage_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = start_script("gpu_check", "--only", "nonsense", cwd=tmp_path)
    assert result.returncode == 2 and "nonsense" in result.stderr


def test_help_shows_examples_and_outputs(tmp_path: Path) -> None:
    result = start_script("gpu_check", "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "python launch/gpu_check.py --small" in result.stdout and "Outputs" in result.stdout


def test_every_stage_is_a_module_with_a_limit() -> None:
    folder = ROOT / "launch/gpu_stages"
    assert [name for name in gpu_check.STAGES if not (folder / f"{name}.py").is_file()] == []


def test_the_first_stages_fit_the_budget() -> None:
    """The most informative stages are never cut short, and the engine comes last."""
    assert list(gpu_check.STAGES)[-1] == "engine"
    limits = list(gpu_check.STAGES.values())
    assert sum(limits[:6]) <= gpu_check.BUDGET_S <= 540


def test_the_bundle_holds_what_its_packages_require() -> None:
    """Its wheels are installed without their requirements."""
    typical = closure(("torch", "triton", "transformers", "numpy", "packaging"))
    bundle = bundle_names()
    assert closure(bundle) - typical - {normalize(name) for name in bundle} == set()
