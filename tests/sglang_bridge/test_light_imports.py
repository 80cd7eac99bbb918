"""Modules that the collector and the configuration import do not load torch or SGLang."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "sglang", "transformers", "megatron", "megatron_rl")
MODULES = (
    "sglang_bridge",
    "sglang_bridge.server.supervise",
    "sglang_bridge.keys",
    "sglang_bridge.addresses",
    "sglang_bridge.settings",
    "sglang_bridge.server.lifeline",
    "sglang_bridge.server.gpus",
    "sglang_bridge.server.readiness",
    "sglang_bridge.admin",
    "sglang_bridge.generation",
    "sglang_bridge.client",
    "sglang_bridge.server.managed_engine",
)
IMPORTS = """
import importlib, json, sys
modules, heavy = json.loads(sys.argv[1])
loaded = {}
for module in modules:
    importlib.import_module(module)
    loaded[module] = [name for name in heavy if name in sys.modules]
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def heavy_by_module() -> dict[str, list[str]]:
    """The heavy packages that one process has loaded after each module, in this order."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps([MODULES, HEAVY])],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_nothing_heavy(module: str, heavy_by_module: dict[str, list[str]]) -> None:
    assert heavy_by_module[module] == []


def test_supervisor_imports_stay_light() -> None:
    heavy = ("numpy", "msgspec", "aiohttp")
    code = (
        "import sys, sglang_bridge.server.supervise\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
