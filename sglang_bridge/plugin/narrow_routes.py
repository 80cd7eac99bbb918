"""Sends an expert of a route as one or two bytes instead of four.

SGLang finds `register` through its entry point group `sglang.srt.plugins` (`setup.py`). It acts in
servers that the bridge starts, or that you start with `SGLANG_BRIDGE_NARROW_ROUTES=1`.
"""

from __future__ import annotations

import os
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VARIABLE = "SGLANG_BRIDGE_NARROW_ROUTES"
# The key of a server's internal state that says whether its scheduler narrows routes.
STATE_KEY = "sglang_bridge_narrow_routes"
_CAPTURER = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.get_topk"
_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state"
    ".SchedulerInternalStateController.get_internal_state"
)


def register() -> None:
    """Hook the scheduler's functions that return routes and its state."""
    if os.environ.get(VARIABLE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CAPTURER, narrow, HookType.AFTER)
    HookRegistry.register(_STATE, _declare, HookType.AFTER)


def narrow(rows: torch.Tensor | None, *_: Any, **__: Any) -> torch.Tensor | None:
    """Return the routes of a request in the smallest type that holds them.

    rows: int32 [inputs, layers, topk], or None. Rows with a negative number stay as they are: no
    expert has it, and the client refuses it. As an unsigned number it might look like an expert.
    """
    import torch

    if rows is None or rows.numel() == 0:
        return rows
    low, high = torch.aminmax(rows)
    if low < 0:
        return rows
    for dtype in (torch.uint8, torch.uint16):
        if high <= torch.iinfo(dtype).max:
            return rows.to(dtype)
    return rows


def _declare(reply: Any, *_: Any, **__: Any) -> Any:
    reply.internal_state[STATE_KEY] = _is_hooked()
    return reply


def _is_hooked() -> bool:
    """Return False if SGLang could not hook `narrow`: then it has only logged that."""
    try:
        return hasattr(pkgutil.resolve_name(_CAPTURER), "__wrapped__")
    except (ImportError, AttributeError):
        return False
