"""Modules that the collector and the configuration import do not load torch or SGLang."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "sglang", "transformers", "megatron", "megatron_rl")


@pytest.mark.parametrize(
    "module",
    [
        "sglang_bridge",
        "sglang_bridge.client",
        "sglang_bridge.generation",
        "sglang_bridge.server.managed_engine",
        "sglang_bridge.admin",
        "sglang_bridge.server.gpus",
        "sglang_bridge.keys",
        "sglang_bridge.server.lifeline",
        "sglang_bridge.settings",
        "sglang_bridge.addresses",
        "sglang_bridge.server.readiness",
        "sglang_bridge.server.supervise",
    ],
)
def test_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


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
