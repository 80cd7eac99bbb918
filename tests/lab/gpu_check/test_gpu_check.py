"""`tests/lab/gpu_check` runs on a CPU, continues after a failed stage, and names the failure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab.gpu_check import check
from tests.lab.gpu_check.bare_machine import bundle_names, closure, normalize, write_blocker
from tests.lab.gpu_check.environment import stage_environment
from tests.lab.gpu_check.facts import Facts
from tests.lab.gpu_check.outcome import Outcome, OutputReader
from tests.lab.gpu_check.record import Log
from tests.lab.gpu_check.stages import BUDGET_S, PARTS, STAGES, Stage, stage_limit
from tests.lab.gpu_stages.stage import Setting
from tests.support.scripts import ROOT, start_gpu_check

# What a CPU cannot show, by the word that its reason must have
SKIPPED = {
    "fp8_training": "Transformer Engine",
    "engine": "sglang",
    "engine_on_cpu": "sglang",
    "profile": "CUDA",
    "train_local": "train",
    "sanitizer": "compute-sanitizer",
}
# `bench_logprob` is `bench` with another choice, which compiles for a minute
EVERY_STAGE = tuple(name for name in STAGES if name != "bench_logprob")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("machine", "quantize", "sanitizer"), id="some stages"),
        pytest.param(EVERY_STAGE, id="all stages", marks=pytest.mark.nightly),
    ],
)
def test_stages_run_small_on_a_bare_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Only packages that a GPU machine without network has can be imported.

    SGLang is none of them (`test_engine_stage.py`), and no CPU runs FP8 training.
    """
    write_blocker(tmp_path / "bare", extra=("numba", "llvmlite"))  # for the kernels on CPUs
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bare"))
    out = tmp_path / "result"
    script = str(ROOT / "tests/lab/gpu_check")
    process = subprocess.run(
        [
            sys.executable,
            script,
            "--small",
            "--budget",
            "1100",
            "--out",
            str(out),
            "--only",
            *names,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    record = json.loads((out / "check.json").read_text())
    failures = {s["stage"]: s["tail"] for s in record["stages"] if s["status"] == "failed"}
    assert process.returncode == 0, json.dumps(failures, indent=1)
    check_record(record)
    assert [stage["stage"] for stage in record["stages"]] == list(names)
    for text in ("stage", *names, f"written: {out}"):
        assert text in process.stdout
    log = (out / "check.log").read_text()
    assert all(f"===== {name}\n" in log for name in names)
    assert {path.name for path in out.iterdir()} == {"check.json", "check.log"}


def check_record(record: dict[str, Any]) -> None:
    stages = {stage["stage"]: stage for stage in record["stages"]}
    exceptions = {name: s["status"] for name, s in stages.items() if s["status"] != "passed"}
    skipped_stages = stages.keys() & SKIPPED.keys()
    assert exceptions == dict.fromkeys(skipped_stages, "skipped"), record
    assert [name for name in skipped_stages if SKIPPED[name] not in stages[name]["reason"]] == []
    assert record["small"] and record["date"] and record["machine"]["torch"]
    if "train" in stages:
        assert stages["train"]["values"]["replayed_tokens_s"] > 0
    if "kernels" in stages:
        assert stages["kernels"]["values"]["passed"] > 0
    assert stages["machine"]["values"]["imports"] == [], "SGLang is hidden"


def write_stage(root: Path, name: str, body: str) -> None:
    folder = root / "tests" / "lab" / "gpu_stages"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(body)


def report(**values: object) -> str:
    record = json.dumps({"status": "passed", "reason": "", "values": values})
    return f"print('GPU-CHECK ' + {json.dumps(record)}, flush=True)\n"


def value(**values: object) -> str:
    return f"print('GPU-CHECK ' + {json.dumps(json.dumps({'values': values}))}, flush=True)\n"


def use_stages(monkeypatch: pytest.MonkeyPatch, root: Path, limits: Mapping[str, int]) -> None:
    """Let the check run the stages below `root` instead of its own."""
    stages = {name: Stage(limit, name, compiles=False) for name, limit in limits.items()}
    monkeypatch.setattr(check, "ROOT", root)
    monkeypatch.setattr(check, "STAGES", stages)


def read_stages(folder: Path) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = json.loads((folder / "check.json").read_text())["stages"]
    return stages


HANG = "import time\ntime.sleep(60)\n"


@pytest.mark.slow
def test_other_stages_run_after_one_fails_hangs_or_dies(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_stage(tmp_path, "machine", report(device="Some GPU (tm)", torch="9"))
    write_stage(tmp_path, "dies", "print('a line before')\nimport os\nos.kill(os.getpid(), 11)\n")
    write_stage(tmp_path, "hangs", value(half="way") + value(more=2) + HANG)
    write_stage(tmp_path, "last", report(number=1.5))
    use_stages(monkeypatch, tmp_path, {"machine": 60, "dies": 60, "hangs": 3, "last": 60})
    start = time.monotonic()
    assert check.main(["--out", str(tmp_path / "out"), "--budget", "180"]) == 1
    assert time.monotonic() - start < 50
    stages = read_stages(tmp_path / "out")
    assert [stage["status"] for stage in stages] == ["passed", "failed", "failed", "passed"]
    assert stages[1]["reason"] == "it ended with code -11 and without a report"
    assert stages[1]["tail"] == ["a line before"]
    assert re.fullmatch(r"it exceeded its limit of \d s", stages[2]["reason"])
    assert stages[2]["values"] == {"half": "way", "more": 2}
    output = capsys.readouterr().out
    assert re.search(r"^last +passed +\d", output, flags=re.MULTILINE)
    assert "number = 1.5" in output
    log = (tmp_path / "out/check.log").read_text()
    assert log.index("===== dies") < log.index("a line before") < log.index("===== hangs")


@pytest.mark.slow
def test_problems_of_a_stage_that_hangs_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = json.dumps({"problem": "a is false"})
    write_stage(
        tmp_path, "first", f"print('GPU-CHECK ' + {json.dumps(problem)}, flush=True)\n{HANG}"
    )
    use_stages(monkeypatch, tmp_path, {"first": 60})
    assert check.main(["--out", str(tmp_path / "out"), "--budget", "2"]) == 1
    (stage,) = read_stages(tmp_path / "out")
    assert stage["status"] == "failed", "the problem, and not the budget, is the reason"
    assert stage["reason"].startswith("a is false; the budget ended")


@pytest.mark.slow
def test_a_crash_after_the_report_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_stage(tmp_path, "first", report(a=1) + "import os\nos.kill(os.getpid(), 11)\n")
    use_stages(monkeypatch, tmp_path, {"first": 60})
    assert check.main(["--out", str(tmp_path / "out")]) == 0
    (stage,) = read_stages(tmp_path / "out")
    assert stage["status"] == "passed" and "code -11 after its report" in stage["reason"]


@pytest.mark.slow
def test_stages_beyond_the_budget_are_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stage that only the budget ended says nothing about the GPU."""
    write_stage(tmp_path, "first", value(a=1) + HANG + report())
    write_stage(tmp_path, "second", report())
    use_stages(monkeypatch, tmp_path, {"first": 60, "second": 60})
    assert check.main(["--out", str(tmp_path / "out"), "--budget", "1.5"]) == 0
    stages = read_stages(tmp_path / "out")
    assert [stage["status"] for stage in stages] == ["cut off", "not started"]
    assert stages[0]["values"] == {"a": 1}


def start_check(root: Path, out: Path, *stages: str) -> subprocess.Popen[str]:
    """Start a check of the stages below `root`."""
    program = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\nfrom tests.lab.gpu_check import check\n"
        "from tests.lab.gpu_check.stages import Stage\n"
        f"check.ROOT = Path({str(root)!r})\n"
        f"check.STAGES = {{name: Stage(60, name, compiles=False) for name in {stages!r}}}\n"
        f"sys.exit(check.main(['--out', {str(out)!r}]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_value(folder: Path, name: str) -> None:
    """Wait until the record of a running check holds a value."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        if (folder / "check.json").exists() and name in (folder / "check.json").read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} did not come")


BOTH_VALUES = value(early=1) + "import time\ntime.sleep(1.2)\n" + value(late=2)


@pytest.mark.slow
def test_a_signal_ends_the_running_stage_and_writes_the_record(tmp_path: Path) -> None:
    note_pid = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    write_stage(tmp_path, "first", note_pid + BOTH_VALUES + HANG)
    write_stage(tmp_path, "second", report())
    out = tmp_path / "out"
    process = start_check(tmp_path, out, "first", "second")
    wait_for_value(out, "late")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    stages = read_stages(out)
    assert [stage["status"] for stage in stages] == ["cut off", "not started"]
    assert stages[0]["reason"] == "the command got SIGTERM"
    assert stages[0]["values"] == {"early": 1, "late": 2}
    assert "cut off" in output
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_a_killed_command_leaves_valid_files(tmp_path: Path) -> None:
    write_stage(tmp_path, "first", report(a=1))
    write_stage(tmp_path, "second", "print('a line')\n" + BOTH_VALUES + HANG)
    out = tmp_path / "out"
    process = start_check(tmp_path, out, "first", "second", "third")
    wait_for_value(out, "late")
    process.kill()
    process.wait(10)
    stages = read_stages(out)
    assert [stage["status"] for stage in stages] == ["passed", "running", "not started"]
    assert stages[1]["values"] == {"early": 1, "late": 2}
    assert "a line\n" in (out / "check.log").read_text()
    assert {path.name for path in out.iterdir()} == {"check.json", "check.log"}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a small file system")
@pytest.mark.parametrize("kilobytes", [0, 64])
def test_a_full_disk_is_named(tmp_path: Path, kilobytes: int) -> None:
    """With 0 the record does not fit, with 64 the log of the stage does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        filling = bytes((128 - kilobytes) << 10)
        with pytest.raises(OSError) if not kilobytes else contextlib.nullcontext():
            (disk / "filling").write_bytes(filling + (b"" if kilobytes else b"x"))
        write_stage(tmp_path, "first", "print('x' * 200_000, flush=True)\n" + report())
        result = run_check(tmp_path, disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert result.returncode == 2
    assert "No space left on device" in result.stderr and "--out" in result.stderr
    assert "Traceback" not in result.stderr


def run_check(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    with start_check(root, out, "first") as process:
        output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def test_a_log_keeps_head_and_tail_of_each_stage(tmp_path: Path) -> None:
    log = Log(tmp_path, sections=2, max_bytes=6000)
    for name in ("first", "second"):
        log.begin(name)
        for number in range(2000):
            log.write(f"{name} {number}\n".encode())
    log.close()
    text = (tmp_path / "check.log").read_text()
    assert len(text) <= 6000
    for name in ("first", "second"):
        section = text.partition(f"===== {name}\n")[2].partition("=====")[0]
        assert section.startswith(f"{name} 0\n") and section.endswith(f"{name} 1999\n")
        assert "\n[...]\n" in section and f"{name} 1990\n" in section


def test_the_output_of_a_stage_survives_lines_of_other_processes() -> None:
    outcome = Outcome("first")
    reader = OutputReader(outcome)
    for data in (b"GPU-CH", b'ECK {"values": {"a": 1}}\nno end of li', b'neGPU-CHECK {"values": {'):
        reader.add(data)
    reader.add(b'"b": 2}}\nGPU-CHECK {broken\n')
    reader.finish(3, None)
    assert outcome.values == {"a": 1, "b": 2}
    assert outcome.tail[:2] == ["no end of line", "GPU-CHECK {broken"]
    assert outcome.reason == "it ended with code 3 and without a report"


@pytest.mark.slow
def test_a_stage_knows_its_limit_and_its_choices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = (
        "import json, sys\nreport = {'status': 'passed', 'reason': '', 'values': {'a': sys.argv}}"
    )
    write_stage(tmp_path, "first", body + "\nprint('GPU-CHECK ' + json.dumps(report))\n")
    stage = Stage(40, "first", choices=("one", "two"), compiles=False)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "STAGES", {"renamed": stage})
    check.main(["--out", str(tmp_path / "out")])
    arguments = read_stages(tmp_path / "out")[0]["values"]["a"]
    assert float(arguments[arguments.index("--limit") + 1]) == pytest.approx(80)
    assert arguments[-2:] == ["one", "two"]


@pytest.mark.parametrize("limit", [180.0, 60.0, 10.0])
def test_waits_of_a_stage_end_before_its_limit(tmp_path: Path, limit: float) -> None:
    """Their errors name what was waited for. At its limit, a stage is killed without a word."""
    setting = Setting(True, tmp_path, limit=limit)
    longest = setting.longest_wait(then=45.0)
    assert 0 < longest < limit - 4
    assert limit < 100 or longest == pytest.approx(limit - 45, abs=1)
    late = dataclasses.replace(setting, start=time.monotonic() - limit / 2)
    assert late.longest_wait(then=45.0) <= limit / 2


@pytest.mark.parametrize(
    ("later", "remaining", "limit"),
    [
        (0.0, 500.0, 120.0),  # nothing follows: twice its own
        (400.0, 500.0, 100.0),  # what the others may leave
        (480.0, 500.0, 60.0),  # its own, although the others need more
        (480.0, 30.0, 30.0),
        (480.0, -1.0, -1.0),
    ],
)
def test_a_stage_gets_what_earlier_ones_left(later: float, remaining: float, limit: float) -> None:
    assert stage_limit(60.0, later, remaining) == limit


@pytest.mark.slow
def test_a_result_has_the_device_in_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(check, "read_facts", lambda _: Facts(device="NVIDIA H200 (80GB)"))
    write_stage(tmp_path, "first", report())
    use_stages(monkeypatch, tmp_path, {"first": 60})
    monkeypatch.setattr(check, "PARTS", {2: ("first",)})
    assert check.main(["--part", "2"]) == 0
    (folder,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"nvidia-h200-80gb-\d{4}-\d\d-\d\d-\d{6}-part-2", folder.name)
    assert json.loads((folder / "check.json").read_text())["part"] == 2


@pytest.mark.slow
def test_results_of_another_check_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "check.json").write_text("{}")
    result = start_gpu_check("--small", "--out", str(tmp_path), cwd=tmp_path)
    assert result.returncode == 2 and "another check" in result.stderr


def test_a_stage_sees_one_gpu_and_no_network(tmp_path: Path) -> None:
    def environment(small: bool = False, **parent: str) -> dict[str, str]:
        return stage_environment(parent, ROOT, tmp_path, small=small, packages=[tmp_path / "p"])

    assert environment(CUDA_VISIBLE_DEVICES="3,5")["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment(True, CUDA_VISIBLE_DEVICES="3,5")["CUDA_VISIBLE_DEVICES"] == ""
    assert environment()["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment()["HF_HUB_OFFLINE"] == "1"
    path = environment(PYTHONPATH="/mine")["PYTHONPATH"].split(":")
    assert path == [str(ROOT), str(ROOT / "kernels"), str(tmp_path / "p"), "/mine"]


def test_caches_go_to_the_scratch_folder_if_home_is_missing(tmp_path: Path) -> None:
    for parent in ({}, {"HOME": "/proc/nowhere"}):
        environment = stage_environment(parent, ROOT, tmp_path, small=False)
        assert environment["HOME"] == str(tmp_path) and environment["PYTHONUSERBASE"]
    home = stage_environment({"HOME": str(ROOT)}, ROOT, tmp_path, small=False)
    assert home["HOME"] == str(ROOT) and "PYTHONUSERBASE" not in home


@pytest.mark.slow
def test_stages_that_compile_are_skipped_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "STAGES", {"train": Stage(60, "first")})
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert check.main(["--out", str(tmp_path / "out")]) == 0
    (stage,) = read_stages(tmp_path / "out")
    assert stage["status"] == "skipped" and "C compiler" in stage["reason"]


@pytest.mark.slow
def test_a_stage_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    result = start_gpu_check("--only", "nonsense", cwd=tmp_path)
    assert result.returncode == 2 and "nonsense" in result.stderr


@pytest.mark.slow
def test_help_shows_examples_and_outputs(tmp_path: Path) -> None:
    result = start_gpu_check("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "python tests/lab/gpu_check --small" in result.stdout and "Outputs" in result.stdout


@pytest.mark.slow
def test_the_harness_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """The packages of the trainer are still packed when it starts."""
    command = [sys.executable, "-S", str(ROOT / "tests/lab/gpu_check"), "--help"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, env={}, timeout=60)
    assert process.returncode == 0, process.stderr


def test_every_stage_is_a_module_with_a_limit() -> None:
    folder = ROOT / "tests/lab/gpu_stages"
    modules = [stage.module.replace(".", "/") for stage in STAGES.values()]
    assert [name for name in modules if not (folder / f"{name}.py").is_file()] == []


def test_each_part_fits_one_call() -> None:
    """A machine ends a command after ten minutes, and unpacking takes some seconds."""
    assert {name for names in PARTS.values() for name in names} == STAGES.keys()
    sums = {part: sum(STAGES[name].limit for name in names) for part, names in PARTS.items()}
    assert max(sums.values()) <= 530 <= BUDGET_S - 10 <= 540, sums


@pytest.mark.slow
def test_the_bundle_holds_what_its_packages_require() -> None:
    """Its wheels are installed without their requirements."""
    typical = closure(("torch", "triton", "transformers", "numpy", "packaging"))
    bundle = bundle_names()
    assert closure(bundle) - typical - {normalize(name) for name in bundle} == set()
