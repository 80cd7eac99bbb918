"""Contracts, configuration and model families load without torch, which takes seconds to import."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PACKAGES = ("contracts", "config", "models")
READS_TENSORS = {
    f"megatron_rl.models.hf_checkpoint.{name}" for name in ("reader", "writer", "merging")
}


def modules_of(package: str) -> set[str]:
    files = (ROOT / "megatron_rl" / package).rglob("*.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__") for name in names}


def imports_torch(modules: set[str]) -> bool:
    program = f"import sys, {', '.join(sorted(modules))}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return result.stdout.strip() == "True"


def test_contracts_config_and_models_do_not_import_torch() -> None:
    modules = set[str]().union(*(modules_of(package) for package in PACKAGES))
    assert modules >= READS_TENSORS | {"megatron_rl.models.families", "megatron_rl.config.schema"}
    assert not imports_torch(modules - READS_TENSORS)


def test_the_modules_that_read_tensors_import_torch() -> None:
    assert imports_torch(READS_TENSORS)
