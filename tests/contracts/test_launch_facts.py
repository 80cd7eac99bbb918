"""GPUs that the installed torch can use are counted without importing torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.contracts import launch_facts
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, 3), ("", 0), ("-1", 0), ("0,2", 2), ("1,-1,2", 1), ("0,1,2,3", 3), ("GPU-5a,MIG-7", 2)],
)
def test_gpus_are_counted_without_torch(tmp_path: Path, visible: str | None, gpus: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    facts = LaunchFacts.from_environment(environment, tmp_path, uses_cuda=True)
    assert facts == LaunchFacts(world_size=4, local_world_size=2, num_gpus=gpus)
    facts = LaunchFacts.from_environment(environment, tmp_path, uses_cuda=False)
    assert facts == LaunchFacts(world_size=4, local_world_size=2, num_gpus=0, idle_gpus=gpus)


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "x"), ("LOCAL_WORLD_SIZE", ""), ("WORLD_SIZE", "0")]
)
def test_invalid_world_size_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigurationRefused, match=f"{name}=.*unset {name}"):
        LaunchFacts.from_environment({name: value}, uses_cuda=False)


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_broken_transformer_engine_is_reported_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """An engine built for another torch is found, but cannot be imported."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(f"raise {error}('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    # An earlier test of this process may have hidden it (megatron_rl/mcore/gpu_libraries.py).
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    launch_facts.transformer_engine_error.cache_clear()
    try:
        facts = LaunchFacts.from_environment({}, tmp_path, uses_cuda=True)
        assert not launch_facts.has_transformer_engine()
        assert not facts.transformer_engine
        assert "undefined symbol: _ZN3c10" in facts.transformer_engine_error
    finally:
        launch_facts.transformer_engine_error.cache_clear()


def test_transformer_engine_finds_the_libraries_that_torch_loads(tmp_path: Path) -> None:
    """Its library needs NCCL's, which torch loads from its own packages."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    needs_torch = "import sys\nif 'torch' not in sys.modules: raise OSError('libnccl.so.2')"
    (package / "__init__.py").write_text(needs_torch)
    (package / "pytorch.py").write_text("")
    command = "from megatron_rl.contracts import launch_facts as facts"
    command += "; sys.exit(facts.transformer_engine_error())"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {command}"],
        capture_output=True,
        text=True,
    )
    assert result.stderr.strip() == ""


def test_a_missing_transformer_engine_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_facts, "find_spec", lambda name: None)
    launch_facts.transformer_engine_error.cache_clear()
    try:
        assert not launch_facts.has_transformer_engine()
        assert launch_facts.transformer_engine_error() == ""
    finally:
        launch_facts.transformer_engine_error.cache_clear()
