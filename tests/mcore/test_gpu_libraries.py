"""Transformer Engine and Apex on machines where they do not run."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import ModelSettings
from megatron_rl.contracts.launch_facts import transformer_engine_error
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.lab.te_rehearsal.families import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "tests" / "mcore" / "gpu_libraries"


def train(checkpoints: Sequence[Path], *folders: Path) -> str:
    """Train on the CPU in another process, with packages of `folders`. Returns its output."""
    paths = [ROOT, ROOT / "kernels", *folders]
    result = subprocess.run(
        [sys.executable, LIBRARIES / "two_steps.py", *checkpoints],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert " was called" not in result.stderr
    return result.stdout


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with libraries that cannot be imported without a driver."""
    for package in ("transformer_engine", "apex"):
        (tmp_path / "broken" / package).mkdir(parents=True)
        (tmp_path / "broken" / package / "__init__.py").write_text(
            "raise OSError('no libcuda.so.1')"
        )
    return tmp_path / "broken"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cpu_trains_beside_libraries_that_need_a_gpu(tmp_path: Path, broken: Path) -> None:
    """The weights are those without these libraries, bit for bit, in both number formats.

    An installed library may run on GPUs only, or it may not even be imported without a driver.
    """
    checkpoints = [tmp_path / family for family in ("qwen3_moe", "deepseek_v3")]
    for checkpoint in checkpoints:
        write_tiny_model(checkpoint.name, checkpoint)
    weights = train(checkpoints)
    assert len(weights.splitlines()) == 4
    assert train(checkpoints, LIBRARIES) == weights
    assert train(checkpoints, broken) == weights


@pytest.fixture
def norm(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A Transformer Engine on a GPU, whose norm is the entry "l2" of the fixture's value."""
    from megatron_rl.mcore import gpu_libraries

    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    functions: dict[str, Any] = {}
    vars(optimizers).update(
        multi_tensor_l2norm=lambda *arguments: functions["l2"](*arguments),
        multi_tensor_applier=lambda function, flag, lists, *rest: function(1, flag, lists, *rest),
    )
    packages = [ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")]
    for module in (*packages, optimizers):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    transformer_engine_error.cache_clear()
    gpu_libraries.transformer_engine_fault.cache_clear()
    yield functions
    transformer_engine_error.cache_clear()
    gpu_libraries.transformer_engine_fault.cache_clear()


def model(spec: Any = None, dtype: Any = "bfloat16") -> ModelSettings:
    return ModelSettings(path="x", spec=spec, dtype=dtype)


def refuse_kernel(*_: Any) -> None:
    raise RuntimeError("CUDA error: device kernel image is invalid")


@pytest.mark.parametrize("spec", [None, "te"])
@pytest.mark.parametrize(
    ("l2", "reason"),
    [
        (refuse_kernel, "H200: RuntimeError: CUDA error: device kernel image is invalid"),
        (lambda *_: (torch.zeros(1), None), r"the norm of \(2, 2, 2, 2\) is 0.0"),
    ],
)
def test_kernels_that_do_not_run_are_refused_by_name(
    norm: dict[str, Any], spec: Any, l2: Any, reason: str
) -> None:
    from megatron_rl.mcore.layer_spec import resolve_spec

    norm["l2"] = l2
    expected = f"model.spec=.*Transformer Engine is installed.*{reason}.*use model.spec=local"
    with pytest.raises(ConfigurationRefused, match=f"(?s){expected}"):
        resolve_spec(model(spec))
    assert resolve_spec(model("local")) == "local"
    assert resolve_spec(model(None, "float32")) == "local"


def test_kernels_that_run_are_taken(norm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.mcore import layer_spec
    from megatron_rl.mcore.seams import norm_of_all

    monkeypatch.setattr(layer_spec, "has_transformer_engine", lambda: True)
    norm["l2"] = norm_of_all
    assert layer_spec.resolve_spec(model()) == "te"


@pytest.mark.slow
def test_a_gpu_that_cannot_import_it_gets_the_substitutes(broken: Path) -> None:
    """Megatron itself could not be imported beside it."""
    code = """
import torch
torch.cuda.is_available = lambda: True
from megatron_rl.mcore import compat
compat.install()
import megatron.core.optimizer as optimizer
from importlib.util import find_spec
from megatron_rl.mcore.adam import FusedLayoutAdam
from megatron_rl.mcore.gpu_libraries import transformer_engine_fault
assert optimizer.Adam is FusedLayoutAdam
assert find_spec("transformer_engine") is None
assert "cannot be imported: OSError: no libcuda.so.1" in transformer_engine_fault()
"""
    shutil.rmtree(broken / "apex")
    paths = [ROOT, ROOT / "kernels", broken]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def test_hidden_modules_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.mcore.gpu_libraries import hide_modules

    for name in ("gpu_library", "gpu_libraries_of_others"):
        (tmp_path / name).mkdir()
        for file in ("__init__.py", "part.py"):
            (tmp_path / name / file).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("gpu_library.part")
    try:
        hide_modules(["gpu_library", "gpu_library_of_nobody"])
        for name in ("gpu_library", "gpu_library.part", "gpu_library_of_nobody"):
            with pytest.raises(ImportError):
                importlib.import_module(name)
        assert find_spec("gpu_library") is find_spec("gpu_library_of_nobody") is None
        importlib.import_module("gpu_libraries_of_others.part")
    finally:
        for name in [name for name in sys.modules if name.startswith("gpu_librar")]:
            del sys.modules[name]
