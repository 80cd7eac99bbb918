"""Makes the micro-batches that a rehearsal trains on."""

from __future__ import annotations

from typing import Literal

import numpy as np

from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.contracts.routes import Routes
from megatron_rl.models.shape import ModelShape

Routing = Literal["balanced", "skewed"]
_UINT8_EXPERTS = 256


def make_rollout(index: int, prompt_tokens: int, response_tokens: int, routes: Routes) -> Rollout:
    """A rollout whose tokens mean nothing. routes: [tokens - 1, MoE layers of the rank, topk]."""
    total = prompt_tokens + response_tokens
    prompt = Segment(
        np.zeros(prompt_tokens, np.int32), Role.PROMPT, False, None, (0, prompt_tokens), 0
    )
    logprobs = np.full(response_tokens, -1.0, np.float32)
    response = Segment(
        np.zeros(response_tokens, np.int32),
        Role.RESPONSE,
        True,
        logprobs,
        (prompt_tokens, total - 1),
        0,
    )
    name = str(index)
    return Rollout(name, name, 0, FinishReason.STOP, (prompt, response), routes)


def make_routes(
    rows: int, num_layers: int, shape: ModelShape, routing: Routing, generator: np.random.Generator
) -> Routes:
    """Draw the experts of each row, without replacement, as [rows, num_layers, topk].

    balanced: in each layer every expert gets the same number of rows, but for rounding. skewed:
    expert i is chosen in proportion to 1 / (i + 1) ** 0.5, so that the first ones get several times
    the mean.
    """
    size = (rows, num_layers)
    if routing == "balanced":
        # Each layer by itself: with a stride of all layers some would use few of the experts
        first = (np.arange(rows)[:, None] + np.arange(num_layers)) * shape.topk
        experts = (first[..., None] + np.arange(shape.topk)) % shape.num_experts
        return _as_routes(experts, shape)
    # The largest keys of Gumbel noise plus log-weights are a draw without replacement
    log_weights = -0.5 * np.log(np.arange(1, shape.num_experts + 1))
    keys = generator.gumbel(size=(*size, shape.num_experts)) + log_weights
    return _as_routes(np.argpartition(-keys, shape.topk, axis=-1)[..., : shape.topk], shape)


def _as_routes(experts: np.ndarray, shape: ModelShape) -> Routes:
    if shape.num_experts <= _UINT8_EXPERTS:
        return experts.astype(np.uint8)
    return experts.astype(np.uint16)
