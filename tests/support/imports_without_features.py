"""Imports trees of sources that lack a feature, and trains a run over stand-ins in each.

Run as a script with the roots of the trees. Prints what fails.
"""

import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path

_OWN_PACKAGES = ("megatron_rl", "sglang_bridge", "espo_kernels", "launch")
# Slow imports that every tree shares
_SHARED = ("torch", "megatron.core", "transformers", "omegaconf", "hypothesis")


def main(roots: list[str]) -> int:
    """Import each tree in a child of its own. Returns the exit code."""
    for name in _SHARED:
        importlib.import_module(name)
    failures = 0
    for root in roots:
        child = os.fork()
        if not child:
            os._exit(_import_all(Path(root)))
        _, status = os.waitpid(child, 0)
        failures += status != 0
    return failures


def _import_all(root: Path) -> int:
    try:
        # torch may have imported the installed package, whose handler of errors torchrun uses
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN_PACKAGES]:
            del sys.modules[name]
        sys.path.insert(0, str(root))
        for name in modules_of(root, "megatron_rl") + modules_of(root, "launch"):
            module = importlib.import_module(name)
            assert str(module.__file__).startswith(str(root)), f"{name} is {module.__file__}"
        _train(Path(tempfile.mkdtemp()))
    except BaseException:
        print(f"{root}:\n{traceback.format_exc()}", flush=True)
        return 1
    return 0


def modules_of(root: Path, package: str) -> list[str]:
    """Return the modules of a package that can be imported."""
    files = sorted((root / package).rglob("*.py"))
    paths = [file.relative_to(root).with_suffix("") for file in files]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


def _train(directory: Path) -> None:
    """Train two steps over scripted parts, with the features that are left."""
    leaders = importlib.import_module("tests.support.leaders")
    parts = leaders.lead(leaders.ScriptedParts(), directory)
    assert parts.calls[-2:] == ["finish", "stop"], parts.calls
    assert sorted(parts.metrics) == [0, 1, 2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
