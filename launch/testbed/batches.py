"""One global batch of well-formed rollouts, the same wherever it is made."""

from collections.abc import Sequence

import numpy as np

from launch.testbed.rollout_refs import make_ref
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.models.shape import ModelShape


def make_batch(
    model: ModelShape, count: int, *, seed: int = 0
) -> tuple[list[RolloutRef], list[Rollout], list[float]]:
    """`count` samples of 9 to 40 tokens with routes, one of them with a masked tool turn, and their
    advantages.
    """
    rng = np.random.default_rng(seed)
    rollouts = [_make_rollout(model, index, rng) for index in range(count)]
    advantages = [float(a) for a in rng.normal(size=count)]
    return [make_ref(rollout) for rollout in rollouts], rollouts, advantages


def _make_rollout(model: ModelShape, index: int, rng: np.random.Generator) -> Rollout:
    num_prompt = int(rng.integers(4, 15))
    lengths = [int(rng.integers(5, 27))] if index % 3 else [4, 3, 6]
    roles = [Role.RESPONSE] if index % 3 else [Role.RESPONSE, Role.TOOL, Role.RESPONSE]
    segments = [
        Segment(_tokens(model, num_prompt, rng), Role.PROMPT, False, None, (0, num_prompt), 0)
    ]
    position, total = num_prompt, num_prompt + sum(lengths)
    for length, role in zip(lengths, roles, strict=True):
        sampled = role is Role.RESPONSE
        logprobs = (-rng.exponential(size=length)).astype(np.float32) if sampled else None
        rows = (position, min(position + length, total - 1))
        segments.append(Segment(_tokens(model, length, rng), role, sampled, logprobs, rows, 0))
        position += length
    scores = rng.random((total - 1, len(model.moe_layers), model.num_experts))
    routes = np.argsort(scores, axis=-1)[..., : model.topk].astype(np.uint8)
    routes = routes if model.moe_layers else None
    return Rollout(f"t{index}", f"p{index}", 0, FinishReason.STOP, tuple(segments), routes)


def _tokens(model: ModelShape, count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, model.vocab_size, count).astype(np.int32)


def shuffled(items: Sequence[int], seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(items).tolist()
