"""`launch/gpu_check.py` runs from start to end on a CPU, goes on after a stage fails, and says what
failed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.gpu.bare_machine import bundled, closure, normal, write_blocker
from tests.support.scripts import load_script, start_script

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gpu_check")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stage_runs_small_on_a_cpu_with_torch_transformers_and_the_bundle(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but the engine, whose parts tests/engine holds, and FP8 training, which no CPU has.

    Of the installed packages only those are there that a GPU machine without network would have.
    """
    write_blocker(tmp_path / "bare", also=("numba", "llvmlite"))  # the kernels' path on CPUs
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bare"))
    assert {*WITHOUT_ENGINE, "fp8_training", "engine"} == set(script.STAGES)
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        str(ROOT / "launch/gpu_check.py"),
        "--small",
        "--out",
        str(out),
        "--only",
    ]
    done = subprocess.run(
        [*command, *WITHOUT_ENGINE, "fp8_training"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads(out.read_text())
    failed = {
        s["stage"]: [s["reason"], *s["tail"]] for s in record["stages"] if s["status"] == "failed"
    }
    assert done.returncode == 0, json.dumps(failed, indent=1)
    assert record["small"] and record["date"] and record["machine"]["torch"]
    stages = {stage["stage"]: stage for stage in record["stages"]}
    assert {
        name: stage["status"] for name, stage in stages.items() if stage["status"] != "passed"
    } == {"fp8_training": "skipped"}
    assert stages["train"]["values"]["replayed_tokens_s"] > 0
    assert stages["kernels"]["values"]["passed"] > 0
    assert stages["machine"]["values"]["imports"] == [], "SGLang is hidden"
    assert (
        "stage" in done.stdout and "replay_cost" in done.stdout and f"written: {out}" in done.stdout
    )


def write_stage(root: Path, name: str, body: str) -> None:
    folder = root / "tests" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(body)


def report(**values: object) -> str:
    return f"print('GPU-CHECK ' + {json.dumps(json.dumps({'status': 'passed', 'reason': '', 'values': values}))})\n"


def test_the_others_run_after_one_fails_hangs_or_dies(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_stage(tmp_path, "machine", report(device="Some GPU (tm)", torch="9"))
    write_stage(
        tmp_path, "dies", "print('what it said before')\nimport os\nos.kill(os.getpid(), 11)\n"
    )
    write_stage(
        tmp_path,
        "hangs",
        report(half="way") + "import sys, time\nsys.stdout.flush()\ntime.sleep(60)\n",
    )
    write_stage(tmp_path, "last", report(number=1.5))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "STAGES", {"machine": 60, "dies": 60, "hangs": 6, "last": 60})
    start = time.monotonic()
    assert script.main(["--out", str(tmp_path / "out.json")]) == 1
    assert time.monotonic() - start < 50
    stages = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert [stage["status"] for stage in stages] == ["passed", "failed", "failed", "passed"]
    assert stages[1]["reason"] == "it ended with code -11 and without a report"
    assert stages[1]["tail"] == ["what it said before"]
    assert stages[2]["reason"] == "it ran past its limit of 6 s" and stages[2]["values"] == {
        "half": "way"
    }
    printed = capsys.readouterr().out
    assert (
        re.search(r"^last +passed +\d", printed, flags=re.MULTILINE) and "number = 1.5" in printed
    )


def test_what_the_budget_does_not_cover_is_not_started(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_stage(tmp_path, "first", "import time\ntime.sleep(2)\n" + report())
    write_stage(tmp_path, "second", report())
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "STAGES", {"first": 60, "second": 60})
    script.main(["--out", str(tmp_path / "out.json"), "--budget", "1.5"])
    stages = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert [stage["status"] for stage in stages] == ["failed", "not started"]


def test_a_result_has_the_device_in_its_name(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    outcomes = [script.Outcome("machine", "passed", values={"device": "NVIDIA H200 (80GB)"})]
    file = script.write_record(outcomes, script.argparse.Namespace(small=False, out=None))
    assert re.fullmatch(r"nvidia-h200-80gb-\d{4}-\d\d-\d\d-\d{4}\.json", file.name)


def test_a_stage_sees_one_gpu_and_no_network(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert script.environment(False)["CUDA_VISIBLE_DEVICES"] == "3"
    assert script.environment(True)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert script.environment(False)["CUDA_VISIBLE_DEVICES"] == "0"
    assert script.environment(False)["HF_HUB_OFFLINE"] == "1"


def test_a_stage_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = start_script("gpu_check", "--only", "nonsense", cwd=tmp_path)
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_all_limits_are_known_and_the_first_stages_fit_the_budget(script: ModuleType) -> None:
    """What is most telling is never cut short: the engine comes last."""
    assert list(script.STAGES)[-1] == "engine"
    limits = list(script.STAGES.values())
    assert sum(limits[:6]) <= script.BUDGET_S <= 540


def test_the_bundle_holds_what_its_packages_require() -> None:
    """Its wheels are installed without their requirements."""
    typical = closure(("torch", "triton", "transformers", "numpy", "packaging"))
    assert closure(bundled()) - typical - {normal(name) for name in bundled()} == set()
