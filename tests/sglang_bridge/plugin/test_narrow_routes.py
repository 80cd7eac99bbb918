"""Routes leave an engine in the narrowest type that holds their experts."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sglang_bridge.plugin.narrow_routes import VARIABLE, narrow


@pytest.mark.parametrize(
    ("expert", "dtype", "mark"),
    [
        (0, np.uint8, [0xF1]),
        (255, np.uint8, [0xF1]),
        (256, np.uint16, [0xF2]),
        (65535, np.uint16, [0xF2]),
        (65536, np.int32, []),
        (2**31 - 1, np.int32, []),
        (-1, np.int32, []),  # 255 as uint8, a valid expert of 256
        (-(2**31), np.int32, []),
    ],
)
def test_the_largest_expert_decides_the_type_that_the_last_byte_names(
    expert: int, dtype: type[np.integer], mark: list[int]
) -> None:
    routes = np.zeros((3, 2, 4), np.int32)
    routes[1, 1, 2] = expert
    assert narrow(routes).tobytes() == routes.astype(dtype).tobytes() + bytes(mark)


@pytest.mark.parametrize("value", ["0", "", "yes"])
def test_nothing_happens_in_servers_that_the_bridge_did_not_start(value: str) -> None:
    code = (
        "import sys; from sglang_bridge.plugin.narrow_routes import register; register(); "
        "assert 'sglang' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env={VARIABLE: value}, check=True, timeout=60)


COLLECT = "_maybe_collect_routed_experts"
STAND_INS = """
import base64
import sys
from types import ModuleType, SimpleNamespace

import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_bridge.plugin.narrow_routes import STATE_KEY, register

PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor"
INTERNAL_STATE = "sglang.srt.managers.scheduler_components.internal_state"

class SchedulerInternalStateController:
    def get_internal_state(self):
        return SimpleNamespace(internal_state={})

class SchedulerBatchResultProcessor:
    pass

setattr(SchedulerBatchResultProcessor, sys.argv[1], lambda self, req: None)

def get_serving():
    return SimpleNamespace(skip_tokenizer_init=sys.argv[2] == "text")

def stand_in(name, member):
    module = sys.modules[name] = ModuleType(name)
    setattr(module, member.__name__, member)

stand_in(INTERNAL_STATE, SchedulerInternalStateController)
stand_in(PROCESSOR, SchedulerBatchResultProcessor)
register()
HookRegistry.apply_hooks()
print(SchedulerInternalStateController().get_internal_state().internal_state[STATE_KEY])
"""


def run_stand_ins(
    name: str, kind: str = "text", *, more: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the plugin in a process in which modules of SGLang are stand-ins.

    name: of the method that collects routes.
    """
    return subprocess.run(
        [sys.executable, "-c", STAND_INS + more, name, kind],
        env=os.environ | {VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("name", "word"), [(COLLECT, "True"), ("collect_in_another_version", "False")]
)
def test_an_engine_says_that_it_narrows_only_if_its_version_has_what_is_hooked(
    name: str, word: str
) -> None:
    result = run_stand_ins(name)
    assert result.stdout.splitlines()[-1:] == [word], result.stderr[-2000:]


HOOK = """
rows = torch.tensor([[[3, 250]], [[7, 9]]], dtype=torch.int32)
req = SimpleNamespace(routed_experts=rows)
stand_in("sglang.srt.runtime_context", get_serving)
SchedulerBatchResultProcessor()._maybe_collect_routed_experts(req)
if sys.argv[2] == "text":
    assert base64.b64decode(req.routed_experts) == bytes([3, 250, 7, 9, 0xF1])
else:
    assert req.routed_experts.tolist() == [3, 250, 7, 9, 0xF1]
    assert req.routed_experts.dtype is torch.uint8
empty = SimpleNamespace(routed_experts=None)
SchedulerBatchResultProcessor()._maybe_collect_routed_experts(empty)
assert empty.routed_experts is None
"""


@pytest.mark.parametrize("kind", ["text", "tensor"])
def test_routes_are_sent_as_text_unless_a_detokenizer_encodes_them(kind: str) -> None:
    """A request without routes is left alone."""
    result = run_stand_ins(COLLECT, kind, more=HOOK)
    assert result.returncode == 0, result.stderr[-2000:]
