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


def test_engines_import_torchvision_where_there_is_none_and_transformers_sees_none(tmp_path: Path) -> None:
    package = tmp_path / "sglang" / "srt" / "configs"
    package.mkdir(parents=True)
    for empty in (package.parent, package.parents[1]):
        (empty / "__init__.py").touch()
    (package / "__init__.py").write_text(CONFIGS)
    path = os.pathsep.join([str(cpu_shim_path()), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", "import sglang.srt.configs"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "False True\n", done.stderr
