"""What the directory on a CPU engine's PYTHONPATH stands in for."""

import os
import subprocess
import sys
from pathlib import Path

from sglang_bridge.cpu_support import cpu_shim_path

# The imports of SGLang's configurations, then what transformers is to know of it.
CONFIGS = """
import importlib.util
import torchvision.transforms as T
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms.functional import InterpolationMode
from transformers.utils import is_torchvision_available
print(is_torchvision_available(), importlib.util.find_spec("torchvision") is not None)
"""


# How SGLang configures its launcher, then what its processes are started with, and what they would start with.
ENGINE = """
import multiprocessing as mp
def _set_envs_and_config(server_args):
    mp.set_start_method("spawn", force=True)
"""
LAUNCH = """
import multiprocessing as mp
from sglang.srt.entrypoints import engine
def tell():
    print(mp.get_start_method(), flush=True)
engine._set_envs_and_config(None)
tell()
scheduler = mp.Process(target=tell)
scheduler.start()
scheduler.join()
"""


def run_with_shim(directory: Path, package: str, modules: dict[str, str], script: str) -> str:
    """What a script prints where the shim finds an SGLang of these modules."""
    place = directory / package
    place.mkdir(parents=True)
    for empty in (place, *list(place.relative_to(directory).parents)[:-1]):
        (directory / empty / "__init__.py").touch()
    for name, text in modules.items():
        (place / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(cpu_shim_path()), str(directory)])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engines_import_torchvision_where_there_is_none_and_transformers_sees_none(tmp_path: Path) -> None:
    told = run_with_shim(tmp_path, "sglang/srt/configs", {"__init__.py": CONFIGS}, "import sglang.srt.configs")
    assert told == "False True\n"


def test_an_engine_forks_its_processes_and_these_spawn_theirs(tmp_path: Path) -> None:
    assert run_with_shim(tmp_path, "sglang/srt/entrypoints", {"engine.py": ENGINE}, LAUNCH) == "fork\nspawn\n"
