"""Routes leave an engine in the narrowest type that holds their experts."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.plugin.narrow_routes import VARIABLE, narrow


@pytest.mark.parametrize(
    ("expert", "dtype"),
    [
        (0, torch.uint8),
        (255, torch.uint8),
        (256, torch.uint16),
        (65535, torch.uint16),
        (65536, torch.int32),
        (2**31 - 1, torch.int32),
        (-1, torch.int32),  # 255 as uint8, a valid expert of 256
        (-(2**31), torch.int32),
    ],
)
def test_the_largest_expert_decides_the_type(expert: int, dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 2, 4, dtype=torch.int32)
    rows[1, 1, 2] = expert
    result = narrow(rows)
    assert result is not None and result.dtype == dtype
    assert result.to(torch.int64).equal(rows.to(torch.int64))


@given(st.lists(st.integers(-3, 70_000), min_size=1, max_size=12))
def test_no_expert_changes(experts: list[int]) -> None:
    rows = torch.tensor(experts, dtype=torch.int32).view(-1, 1, 1)
    result = narrow(rows)
    assert result is not None and result.to(torch.int64).view(-1).tolist() == experts
    assert len(result.numpy().tobytes()) % len(experts) == 0


@pytest.mark.parametrize("rows", [None, torch.zeros(0, 2, 4, dtype=torch.int32)])
def test_a_request_without_routes_is_left_alone(rows: torch.Tensor | None) -> None:
    assert narrow(rows) is rows


@pytest.mark.parametrize("value", ["0", "", "yes"])
def test_nothing_happens_in_servers_that_the_bridge_did_not_start(value: str) -> None:
    code = (
        "import sys; from sglang_bridge.plugin.narrow_routes import register; register(); "
        "assert 'sglang' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env={VARIABLE: value}, check=True, timeout=60)


STAND_INS = """
import sys
from types import ModuleType, SimpleNamespace
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_bridge.plugin.narrow_routes import STATE_KEY, register

INTERNAL_STATE = "sglang.srt.managers.scheduler_components.internal_state"

class SchedulerInternalStateController:
    def get_internal_state(self):
        return SimpleNamespace(internal_state={})

class RoutedExpertsCapturer:
    pass

setattr(RoutedExpertsCapturer, sys.argv[1], lambda self: None)

def stand_in(name, member):
    module = sys.modules[name] = ModuleType(name)
    setattr(module, member.__name__, member)

stand_in(INTERNAL_STATE, SchedulerInternalStateController)
stand_in("sglang.srt.state_capturer.routed_experts", RoutedExpertsCapturer)
register()
HookRegistry.apply_hooks()
print(SchedulerInternalStateController().get_internal_state().internal_state[STATE_KEY])
"""


@pytest.mark.parametrize(
    ("name", "word"), [("get_topk", "True"), ("get_routes_of_another_version", "False")]
)
def test_an_engine_says_that_it_narrows_only_if_its_version_has_what_is_hooked(
    name: str, word: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", STAND_INS, name],
        env=os.environ | {VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.splitlines()[-1:] == [word], result.stderr[-2000:]
