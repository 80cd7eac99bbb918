"""A real worker on the pretended device computes what it computes on the CPU, bit for bit.

It builds the model, loads weights, trains with replay, recomputation, clipping and Adam, saves,
resumes and exports. These cases are nightly. `make test` compares one step of one rank in
`test_families.py`.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "tests.lab.pretended_device.worker_cases"
# Numbers of ranks, and cases that one start of them runs
CASES = (
    (1, ("single-float32", "single-bfloat16")),
    (2, ("ep2-float32", "ep2-bfloat16")),
    (2, ("pp2-float32", "pp2-bfloat16")),
    (2, ("tp2-float32", "tp2-bfloat16")),
    (2, ("cp2-float32", "cp2-bfloat16")),
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
]


def run_cases(directory: Path, cases: tuple[str, ...], ranks: int, *, on_device: bool) -> None:
    module = ["tests.lab.pretended_device", SCRIPT] if on_device else [SCRIPT]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", "-m", *module, str(directory), *cases],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-6000:]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretended_device")


@cache
def run_both(directory: Path, cases: tuple[str, ...], ranks: int) -> None:
    for place in ("cpu", "device"):
        (directory / place).mkdir(exist_ok=True)
        run_cases(directory / place, cases, ranks, on_device=place == "device")


def results(directory: Path, cases: tuple[str, ...], case: str, rank: int) -> list[dict[str, Any]]:
    """The results of one rank on the CPU and on the device."""
    run_both(directory, cases, max(2 if "2-" in case else 1, rank + 1))
    return [
        torch.load(directory / place / f"{case}-{rank}.pt", weights_only=True)
        for place in ("cpu", "device")
    ]


def all_cases() -> list[Any]:
    return [
        pytest.param(cases, case, rank, id=f"{case}-{rank}")
        for ranks, cases in CASES
        for case in cases
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("cases", "case", "rank"), all_cases())
def test_a_worker_computes_the_same_bits_on_the_device(
    directory: Path, cases: tuple[str, ...], case: str, rank: int
) -> None:
    reference, result = results(directory, cases, case, rank)
    assert reference["device"] == "cpu"
    assert result["device"] == f"cuda:{rank}"
    assert result["steps"] == reference["steps"]
    assert result["steps"][0]["train/grad_norm"] > 0.05, "clipping is part of every step"
    for gradients, others in zip(result["gradients"], reference["gradients"], strict=True):
        assert all(map(torch.equal, gradients, others))
        assert any(gradient.abs().max() > 0 for gradient in gradients)
    for kind in ("weights", "resumed_weights"):
        assert result[kind].keys() == reference[kind].keys()
        for name, weight in result[kind].items():
            assert torch.equal(weight, reference[kind][name]), name


@pytest.mark.parametrize(("cases", "case", "rank"), all_cases())
def test_a_worker_that_resumes_on_the_device_continues_bit_for_bit(
    directory: Path, cases: tuple[str, ...], case: str, rank: int
) -> None:
    _, result = results(directory, cases, case, rank)
    assert result["steps"][2] == result["steps"][1]
    for name, weight in result["weights"].items():
        assert torch.equal(weight, result["resumed_weights"][name]), name
