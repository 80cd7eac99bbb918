"""What the directory on a CPU engine's PYTHONPATH stands in for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bridge.server.command import cpu_shim_path

# The imports of SGLang's configurations, then what transformers is to know of it.
CONFIGS = """
import importlib.util
import torchvision.transforms as T
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms.functional import InterpolationMode
from transformers.utils import is_torchvision_available
print(is_torchvision_available(), importlib.util.find_spec("torchvision") is not None)
"""


# How SGLang starts its processes, and what start method each of them has.
ENGINE = """
import multiprocessing as mp
def _set_envs_and_config(server_args):
    mp.set_start_method("spawn", force=True)
def tell():
    print(mp.get_start_method(), flush=True)
class Engine:
    @classmethod
    def _launch_subprocesses(cls, server_args, tell):
        _set_envs_and_config(server_args)
        tell()
        scheduler = mp.Process(target=tell)
        scheduler.start()
        scheduler.join()
"""
LAUNCH = """
from types import SimpleNamespace
if __name__ == "__main__":
    from sglang.srt.entrypoints import engine
    engine.Engine._launch_subprocesses(SimpleNamespace(numa_node={numa_node}), tell=engine.tell)
    engine.tell()
"""


def run_with_shim(directory: Path, package: str, modules: dict[str, str], script: str) -> str:
    """What a script prints where the shim finds an SGLang of these modules."""
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
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engines_import_torchvision_where_there_is_none_and_transformers_sees_none(
    tmp_path: Path,
) -> None:
    told = run_with_shim(
        tmp_path, "sglang/srt/configs", {"__init__.py": CONFIGS}, "import sglang.srt.configs"
    )
    assert told == "False True\n"


@pytest.mark.parametrize(("numa_node", "launcher"), [(None, "fork"), ([0], "spawn")])
def test_an_engine_forks_its_processes_and_all_else_is_spawned(
    tmp_path: Path, numa_node: list[int] | None, launcher: str
) -> None:
    """While it launches, in the process that it launches, and afterwards."""
    script = LAUNCH.format(numa_node=numa_node)
    told = run_with_shim(tmp_path, "sglang/srt/entrypoints", {"engine.py": ENGINE}, script)
    assert told.split() == [launcher, "spawn", "spawn"]
