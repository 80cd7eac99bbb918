"""The stage `sanitizer` with a program in place of compute-sanitizer, which needs a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.kernels.processes import ROOT, importable
from tests.lab.gpu_stages import sanitizer as stage
from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped

pytestmark = pytest.mark.slow

KERNELS = sorted(kernel for kernels in stage.TESTS.values() for kernel in kernels)
CLEAN = "1 passed in 2.0s\n========= ERROR SUMMARY: 0 errors\n"
# As memcheck prints it
INVALID = """========= Invalid __global__ {access} of size 4 bytes
=========     at {kernel}+0x1f0 in triton_kernels.py:123
=========     by thread (100,0,0) in block (0,0,0)
=========     Access to 0x7f2400190 is out of bounds
"""
SEEN = INVALID.format(access="write", kernel=stage.CONTROL_KERNEL) + (
    "RuntimeError: CUDA error: unspecified launch failure\n"
    "========= Error: process didn't terminate successfully\n"
    "========= ERROR SUMMARY: 1 error\n"
)
REFUSAL = """========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section
=========
========= ERROR SUMMARY: 0 errors
"""
RunStage = Callable[..., Report]


@pytest.fixture
def run_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunStage:
    """Runs the stage with a tool that prints one text for the control, and one for each test.

    outputs: texts by a part of the test's name, instead of `CLEAN`. before: Python code that the
    tool runs first.
    """

    def run(
        control: str = SEEN,
        outputs: dict[str, str] | None = None,
        before: str = "",
        limit: float = 100.0,
    ) -> Report:
        program = tmp_path / stage.TOOL
        program.write_text(
            f"#!{sys.executable}\n"
            "import os, subprocess, sys, time\n"
            f"target = sys.argv[-1]\n{before}\n"
            f"outputs = {dict(outputs or {})!r}\n"
            f"text = next((text for part, text in outputs.items() if part in target), {CLEAN!r})\n"
            f"print({control!r} if target == {stage.CONTROL!r} else text)\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        report = Report()
        stage.sanitizer(Setting(False, tmp_path, limit=limit), report)
        return report

    return run


def results(report: Report) -> dict[str, object]:
    """Each kernel's result."""
    return {kernel: report.values[f"{kernel} errors"] for kernel in KERNELS}


def test_clean_runs_note_zero_errors_for_each_kernel(run_stage: RunStage) -> None:
    report = run_stage()
    assert results(report) == dict.fromkeys(KERNELS, 0)
    assert report.problems == []
    assert report.values["errors in a program that writes out of bounds"] == 1


def test_an_error_is_that_of_its_kernel(run_stage: RunStage) -> None:
    text = 2 * INVALID.format(access="read", kernel="espo_sequence_kernel")
    text += "1 failed in 2.0s\n========= ERROR SUMMARY: 2 errors\n"
    report = run_stage(outputs={"test_several_blocks": text})
    assert report.problems == ["espo_sequence_kernel errors is 2, the limit is 0"]
    (test,) = (test for test in stage.TESTS if "test_several_blocks" in test)
    others = dict.fromkeys(stage.TESTS[test], "not checked: 1 failed in 2.0s")
    assert results(report) == dict.fromkeys(KERNELS, 0) | others | {"espo_sequence_kernel": 2}


def test_older_tools_name_the_kernel_behind_the_address(run_stage: RunStage) -> None:
    text = (
        "========= Invalid __global__ read of size 16 bytes\n"
        "=========     at 0xda0 in /a/quantize.py:57:quantize_fp8_blockwise_kernel\n"
        "========= ERROR SUMMARY: 1 error\n"
    )
    report = run_stage(outputs={"test_same_bits": text})
    assert report.problems == ["quantize_fp8_blockwise_kernel errors is 1, the limit is 0"]


def test_errors_of_unknown_kernels_are_problems_too(run_stage: RunStage) -> None:
    text = INVALID.format(access="read", kernel="vectorized_elementwise_kernel") + CLEAN
    report = run_stage(outputs={"test_same_bits": text.replace("0 errors", "1 error")})
    assert len(report.problems) == 1
    assert "errors elsewhere in" in report.problems[0] and "test_same_bits" in report.problems[0]


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        (REFUSAL, r"cannot check here: Error: Device not supported"),
        ("========= Internal Sanitizer Error: no\n", "cannot check here: Internal Sanitizer Error"),
        ("Traceback\nImportError: no triton", "cannot check here: ImportError: no triton"),
        ("", "cannot check here: it printed nothing"),
    ],
)
def test_a_tool_that_does_not_report_the_control_is_skipped(
    run_stage: RunStage, control: str, reason: str
) -> None:
    with pytest.raises(StageSkipped, match=reason):
        run_stage(control)


def test_a_test_that_could_not_run_is_named(run_stage: RunStage) -> None:
    text = "ERROR: not found\nno tests ran in 0.01s\n========= ERROR SUMMARY: 0 errors\n"
    report = run_stage(outputs={"test_same_bits": text})
    reason = "not checked: no tests ran in 0.01s"
    assert results(report)["quantize_fp8_blockwise_kernel"] == reason
    assert report.problems == []
    tests = ("test_same_bits", "test_several", "test_two_ranks", "test_gradient")
    with pytest.raises(StageSkipped, match="checked no kernel: no tests ran"):
        run_stage(outputs=dict.fromkeys(tests, text))


def test_a_run_that_hangs_is_killed_and_the_others_end_within_the_limit(
    run_stage: RunStage,
) -> None:
    hang = (
        "if 'test_same_bits' in target:\n"
        "    subprocess.run([sys.executable, '-c', 'import time; time.sleep(77.7)'])\n"
    )
    start = time.monotonic()
    report = run_stage(before=hang, limit=30.0)
    assert time.monotonic() - start < 30
    result = str(results(report)["quantize_fp8_blockwise_kernel"])
    assert re.fullmatch(r"not checked: it took longer than \d+ s", result)
    assert results(report)["espo_group_sums_kernel"] == 0
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any("time.sleep(77.7)" in " ".join(command) for command in commands)


def test_each_tensor_has_its_own_allocation(run_stage: RunStage) -> None:
    """Otherwise an access behind a tensor stays within a large allocation of torch's."""
    require = (
        "assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
        "assert sys.argv[1:3] == ['--tool', 'memcheck'] and 'no' in sys.argv"
    )
    assert run_stage(before=require).problems == []


def test_without_a_gpu_or_the_tool_the_stage_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(StageSkipped, match="compute-sanitizer needs a GPU"):
        stage.sanitizer(Setting(True, tmp_path), Report())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageSkipped, match="compute-sanitizer is not on PATH"):
        stage.sanitizer(Setting(False, tmp_path), Report(), tool_folders=[tmp_path / "none"])


def test_every_kernel_of_the_package_is_in_the_table() -> None:
    files = (ROOT / "kernels" / "espo_kernels").rglob("triton_kernel*.py")
    texts = [file.read_text() for file in files]
    names = [name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)]
    assert len(names) > 7
    assert sorted(names) == KERNELS


@pytest.mark.nightly
def test_each_test_launches_its_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    log = tmp_path / "launches.txt"
    words = stage.pytest_words("-p", "tests.lab.gpu_check.launch_log", *stage.TESTS)
    process = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env=importable(TRITON_INTERPRET="1", ESPO_LAUNCH_LOG=str(log)),
    )
    assert f"{len(stage.TESTS)} passed" in process.stdout, process.stdout + process.stderr
    launches = {tuple(line.rsplit(" ", 1)) for line in log.read_text().splitlines()}
    pairs = {(test, kernel) for test, kernels in stage.TESTS.items() for kernel in kernels}
    assert pairs - launches == set()
