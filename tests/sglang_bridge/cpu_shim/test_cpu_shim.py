"""Stand-ins in the directory on a CPU engine's PYTHONPATH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bridge.server.command import cpu_shim_path

# The imports of SGLang's configurations, then what transformers reports about torchvision.
CONFIGS = """
import importlib.util
import torchvision.transforms as T
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms.functional import InterpolationMode
from transformers.utils import is_torchvision_available
print(is_torchvision_available(), importlib.util.find_spec("torchvision") is not None)
"""


# Starts processes as SGLang does and prints the start method of each.
ENGINE = """
import multiprocessing as mp
def _set_envs_and_config(server_args):
    mp.set_start_method("spawn", force=True)
def report():
    print(mp.get_start_method(), flush=True)
class Engine:
    @classmethod
    def _launch_subprocesses(cls, server_args, report):
        _set_envs_and_config(server_args)
        report()
        scheduler = mp.Process(target=report)
        scheduler.start()
        scheduler.join()
"""
LAUNCH = """
from types import SimpleNamespace
if __name__ == "__main__":
    from sglang.srt.entrypoints import engine
    engine.Engine._launch_subprocesses(SimpleNamespace(numa_node={numa_node}), report=engine.report)
    engine.report()
"""


def run_with_shim(directory: Path, package: str, modules: dict[str, str], script: str) -> str:
    """Output of a script for which SGLang consists of these modules."""
    place = directory / package
    place.mkdir(parents=True)
    for empty in (place, *list(place.relative_to(directory).parents)[:-1]):
        (directory / empty / "__init__.py").touch()
    for name, text in modules.items():
        (place / name).write_text(text)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(cpu_shim_path()), str(directory)])
    }
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_engine_imports_torchvision_stand_in_that_transformers_ignores(
    tmp_path: Path,
) -> None:
    output = run_with_shim(
        tmp_path, "sglang/srt/configs", {"__init__.py": CONFIGS}, "import sglang.srt.configs"
    )
    assert output == "False True\n"


@pytest.mark.parametrize(("numa_node", "launcher"), [(None, "fork"), ([0], "spawn")])
def test_engine_forks_its_processes_and_spawns_all_others(
    tmp_path: Path, numa_node: list[int] | None, launcher: str
) -> None:
    """Start methods during the launch, in the launched process, and afterwards."""
    script = LAUNCH.format(numa_node=numa_node)
    output = run_with_shim(tmp_path, "sglang/srt/entrypoints", {"engine.py": ENGINE}, script)
    assert output.split() == [launcher, "spawn", "spawn"]
