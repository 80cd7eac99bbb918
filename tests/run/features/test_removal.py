"""A feature can be deleted: its folder, and its lines in the registry."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.records.past_run import read_metrics
from tests.support import imports_without_features
from tests.support.jobs import ROOT, start_job
from tests.test_import_direction import imports_of, read_modules

FEATURES = ROOT / "megatron_rl" / "run" / "features"
NAMES = sorted(path.name for path in FEATURES.iterdir() if (path / "__init__.py").exists())


def copy_without(feature: str, target: Path) -> Path:
    """Copy the sources, and delete a feature there. What does not change is linked."""
    for package in ("megatron_rl", "launch"):
        shutil.copytree(ROOT / package, target / package)  # with compiled files: they save time
    for name in ("tests", "hydra_conf", "sglang_bridge", "kernels", "pyproject.toml"):
        (target / name).symlink_to(ROOT / name)
    shutil.rmtree(target / "megatron_rl/run/features" / feature)
    registry = target / "megatron_rl/run/features/registry.py"
    lines = registry.read_text().splitlines(keepends=True)
    kept_lines = [line for line in lines if not is_of(line, feature)]
    assert len(lines) - len(kept_lines) == 2, "an import, and an entry of the list"
    registry.write_text("".join(kept_lines))
    return target


def is_of(line: str, feature: str) -> bool:
    is_import = line.startswith(f"from megatron_rl.run.features.{feature}.")
    return is_import or line.strip() == f"open_{feature}," or line.strip() == f"open_{feature}"


def test_nothing_but_the_registry_imports_a_feature() -> None:
    modules = read_modules("megatron_rl") | read_modules("launch")
    prefix = "megatron_rl.run.features."
    registry = f"{prefix}registry"
    importers: dict[str, set[str]] = {name: set() for name in NAMES}
    for module, source in modules.items():
        for target in imports_of(source):
            name = target.removeprefix(prefix).partition(".")[0]
            if target.startswith(prefix) and name in importers:
                importers[name].add(module)
    for name, names in importers.items():
        others = {module for module in names if not module.startswith(f"{prefix}{name}.")}
        assert others == {registry}, name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_rest_is_imported_and_trains_without_a_feature(tmp_path: Path) -> None:
    assert len(NAMES) >= 8
    roots = [str(copy_without(name, tmp_path / name)) for name in NAMES]
    script = imports_without_features.__file__
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-P", script, *roots],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}{result.stderr[-3000:]}"


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_run_with_an_engine_trains_without_samples(tmp_path: Path) -> None:
    root = copy_without("samples", tmp_path / "tree")
    job = start_job(
        tmp_path,
        "train.total_steps=2",
        "samples.every=1",
        python=("env", f"PYTHONPATH={root}"),
        script=str(root / "launch/train_rl.py"),
    )
    output, _ = job.communicate(timeout=280)
    assert job.returncode == 0, output[-6000:]
    records = read_metrics(tmp_path / "job")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert "samples/kept" not in records[1] and "account/engine_tokens" in records[1]
