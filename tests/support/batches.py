"""A global batch of well-formed rollouts, always the same for a seed."""

import numpy as np

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.models.shape import ModelShape
from tests.support.rollout_refs import make_ref


def make_batch(
    model: ModelShape, count: int, *, seed: int = 0
) -> tuple[list[RolloutRef], list[Rollout], list[float]]:
    """Make `count` samples of 9 to 40 tokens with routes, and their advantages.

    One of three has a tool turn, which is masked.
    """
    rng = np.random.default_rng(seed)
    rollouts = [_make_rollout(model, index, rng) for index in range(count)]
    advantages = [float(a) for a in rng.normal(size=count)]
    return [make_ref(rollout) for rollout in rollouts], rollouts, advantages


def _make_rollout(model: ModelShape, index: int, rng: np.random.Generator) -> Rollout:
    num_prompt = int(rng.integers(4, 15))
    # Every third rollout has a tool turn between two responses.
    if index % 3:
        turns = [(Role.RESPONSE, int(rng.integers(5, 27)))]
    else:
        turns = [(Role.RESPONSE, 4), (Role.TOOL, 3), (Role.RESPONSE, 6)]
    total = num_prompt + sum(length for _, length in turns)
    prompt = _tokens(model, num_prompt, rng)
    segments = [Segment(prompt, Role.PROMPT, False, None, (0, num_prompt), 0)]
    position = num_prompt
    for role, length in turns:
        rows = (position, min(position + length, total - 1))
        segments.append(_make_turn(model, role, length, rows, rng))
        position += length
    routes = _routes(model, total - 1, rng)
    return Rollout(f"t{index}", f"p{index}", 0, FinishReason.STOP, tuple(segments), routes)


def _make_turn(
    model: ModelShape, role: Role, length: int, rows: tuple[int, int], rng: np.random.Generator
) -> Segment:
    is_response = role is Role.RESPONSE
    logprobs = (-rng.exponential(size=length)).astype(np.float32) if is_response else None
    return Segment(_tokens(model, length, rng), role, is_response, logprobs, rows, 0)


def _routes(model: ModelShape, rows: int, rng: np.random.Generator) -> np.ndarray | None:
    """Random distinct experts [rows, MoE layers, topk]; None for a model without experts."""
    scores = rng.random((rows, len(model.moe_layers), model.num_experts))
    routes = np.argsort(scores, axis=-1)[..., : model.topk].astype(np.uint8)
    return routes if model.moe_layers else None


def _tokens(model: ModelShape, count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, model.vocab_size, count).astype(np.int32)
