"""Sends an expert of a route as one or two bytes instead of four, and routes as text.

SGLang finds `register` through its entry point group `sglang.srt.plugins` (`setup.py`). It acts in
servers that the bridge starts, or that you start with `SGLANG_BRIDGE_NARROW_ROUTES=1`.
"""

from __future__ import annotations

import os
import pkgutil
from typing import Any

import numpy as np
import numpy.typing as npt

VARIABLE = "SGLANG_BRIDGE_NARROW_ROUTES"
# The key of a server's internal state that says whether its scheduler narrows routes.
STATE_KEY = "sglang_bridge_narrow_routes"
# The types of narrow experts by the byte that follows them. Without it, the first quarter of wide
# routes would look like narrow ones.
TYPES_BY_MARK: dict[int, np.dtype[np.integer[Any]]] = {0xF1: np.dtype("u1"), 0xF2: np.dtype("<u2")}
_COLLECT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)
_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state"
    ".SchedulerInternalStateController.get_internal_state"
)


def register() -> None:
    """Hook the scheduler's functions that collect routes and return its state."""
    if os.environ.get(VARIABLE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_COLLECT, _narrow_request, HookType.AFTER)
    HookRegistry.register(_STATE, _declare, HookType.AFTER)


def narrow(routes: npt.NDArray[np.int32]) -> npt.NDArray[np.integer[Any]]:
    """Return the routes of a request as bytes of the smallest type that holds them, and its mark.

    routes: [inputs, layers, topk], not empty. They stay as they are if a number is too large or
    negative: no expert has it, and the client refuses it. As an unsigned number it might look like
    an expert.
    """
    if routes.min() < 0:
        return routes
    highest = routes.max()
    for mark, dtype in TYPES_BY_MARK.items():
        if highest <= np.iinfo(dtype).max:
            data = np.empty(routes.size * dtype.itemsize + 1, np.uint8)
            data[:-1].view(dtype)[:] = routes.reshape(-1)
            data[-1] = mark
            return data
    return routes


def _narrow_request(result: None, processor: Any, req: Any) -> None:
    """Narrow the routes that the scheduler has collected for a request that ends.

    Without a detokenizer they become the reply's base64: text reaches the HTTP process much faster
    than a tensor. A detokenizer would encode a tensor itself.
    """
    import pybase64
    import torch
    from sglang.srt.runtime_context import get_serving

    rows = req.routed_experts
    if not isinstance(rows, torch.Tensor) or rows.numel() == 0:
        return
    routes = np.ascontiguousarray(narrow(rows.numpy()))
    if get_serving().skip_tokenizer_init:
        req.routed_experts = pybase64.b64encode_as_string(routes.data.cast("B"))
    else:
        req.routed_experts = torch.from_numpy(routes)


def _declare(reply: Any, *_: Any, **__: Any) -> Any:
    reply.internal_state[STATE_KEY] = _is_hooked()
    return reply


def _is_hooked() -> bool:
    """Return False if SGLang could not hook the collection: then it has only logged that."""
    try:
        return hasattr(pkgutil.resolve_name(_COLLECT), "__wrapped__")
    except (ImportError, AttributeError):
        return False
