"""Every model class is loaded, exported and trained on the pretended device with the CPU's bits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "tests.lab.pretended_device.families"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# Experts with and without latent attention
EACH_TIME = (("qwen3_moe", "bfloat16"), ("deepseek_v3", "bfloat16"))
ALL = tuple((family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16"))
Cases = tuple[tuple[str, str], ...]
Rows = dict[tuple[str, str], dict[str, Any]]


def run(file: Path, cases: Cases, *module: str) -> Rows:
    result = subprocess.run(
        [sys.executable, "-m", *module, str(file), *map("-".join, cases)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    rows = json.loads(file.read_text())
    for row in rows:
        assert row["family"] in result.stdout
    return {(row["family"], row["dtype"]): row for row in rows}


def run_both(directory: Path, cases: Cases) -> dict[str, Rows]:
    """The rows of the CPU and of the device."""
    return {
        "cpu": run(directory / "cpu.json", cases, SCRIPT),
        "cuda": run(directory / "cuda.json", cases, "tests.lab.pretended_device", SCRIPT),
    }


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    return run_both(tmp_path_factory.mktemp("families"), EACH_TIME)


@pytest.fixture(scope="module")
def all_places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    return run_both(tmp_path_factory.mktemp("families"), ALL)


def check_bits(places: dict[str, Rows], family: str, dtype: str) -> None:
    reference = places["cpu"][family, dtype]
    row = places["cuda"][family, dtype]
    assert row == reference | {"device": "cuda"}
    assert row["loads_and_exports"] and row["is_applied"] and row["grad_norm"] > 0.5


@pytest.mark.parametrize(("family", "dtype"), EACH_TIME)
def test_two_model_classes_have_the_bits_of_the_cpu(
    places: dict[str, Rows], family: str, dtype: str
) -> None:
    check_bits(places, family, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "dtype"), ALL)
def test_a_model_class_has_the_bits_of_the_cpu(
    all_places: dict[str, Rows], family: str, dtype: str
) -> None:
    check_bits(all_places, family, dtype)


@pytest.mark.nightly
def test_classes_differ(all_places: dict[str, Rows]) -> None:
    hashes = [row["weights"] for row in all_places["cuda"].values()]
    assert len(set(hashes)) == 2 * len(FAMILIES)
