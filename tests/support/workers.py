"""A worker as a run builds it, over a model with random weights, and made-up rollouts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.losses import open_loss
from megatron_rl.mcore import parallel
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.rollouts.wire.store import RolloutStore
from megatron_rl.run.build_worker import build_worker
from megatron_rl.training.worker import Worker
from tests.support.character_tokenizer import write_character_tokenizer
from tests.support.rollout_refs import make_ref

# Random routes are not what the routers choose.
ALLOW_RANDOM_ROUTES = "train.max_route_disagreement=1"
_COMMON = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "eos_token_id": 1,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
}
_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
_LARGE = {
    "hidden_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
}


def write_model(
    directory: Path,
    *,
    small: bool,
    layers: int | None = None,
    vocabulary: int | None = None,
    **changes: int,
) -> ModelShape:
    """Write config.json and the tokenizer of a Qwen3-MoE.

    It has 2.4 billion parameters with 12 layers, or some thousand if `small`. changes: other values
    of config.json.
    """
    config: dict[str, Any] = dict(_COMMON)
    config |= _TINY if small else _LARGE
    config |= changes
    config["intermediate_size"] = 4 * config["hidden_size"]
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    config["vocab_size"] = vocabulary or config["vocab_size"]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_character_tokenizer(directory)
    return read_shape(directory)


def configure(
    model: Path, scratch: Path, *overrides: str, dtype: str | None = None
) -> Configuration:
    """Compose the configuration of a run over `model` that sends nothing to its engines.

    dtype: None for bfloat16 with CUDA, and float32 without.
    """
    if dtype is None:
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    settings = [
        f"model.path={model}",
        "model.init=random",
        f"model.dtype={dtype}",
        "parallel=single",
        "algo=espo",
        "engine=external",
        "engine.urls=['http://127.0.0.1:3']",
        f"run.root={scratch}",
        *overrides,
    ]
    return compose(settings, facts=LaunchFacts.from_environment(os.environ))


def open_worker(c: Configuration, scratch: Path) -> Worker:
    """Build the worker of the only rank, as `launch/train_rl.py` builds it."""
    shape = read_shape(c.model.path)
    layout = parallel.initialize(c.parallel, seed=c.seed)
    return build_worker(c, shape, open_loss(c.algo, shape), layout, scratch / "rollouts")


def make_rollouts(
    shape: ModelShape, count: int, *, prompt: int, response: int, seed: int
) -> tuple[RolloutStore, list[RolloutRef], list[float]]:
    """Make rollouts of random tokens and routes in shared memory.

    Returns the store, which must outlive their use, their references, and advantages of both
    signs. prompt, response: numbers of tokens.
    """
    rng = np.random.default_rng(seed)
    rollouts = [_make_rollout(shape, index, prompt, response, rng) for index in range(count)]
    store = RolloutStore(node=0)
    locations = store.put("batch", rollouts)
    refs = [
        make_ref(rollout, location) for rollout, location in zip(rollouts, locations, strict=True)
    ]
    return store, refs, [1.0 if index % 2 else -1.0 for index in range(count)]


def _make_rollout(
    shape: ModelShape, index: int, prompt: int, response: int, rng: np.random.Generator
) -> Rollout:
    tokens = rng.integers(2, shape.vocab_size, prompt + response).astype(np.int32)
    inputs = len(tokens) - 1
    scores = rng.random((inputs, len(shape.moe_layers), shape.num_experts), dtype=np.float32)
    routes = np.argpartition(scores, -shape.topk, axis=-1)[..., -shape.topk :].astype(np.uint8)
    logprobs = (-rng.exponential(size=response)).astype(np.float32)
    segments = (
        Segment(tokens[:prompt], Role.PROMPT, False, None, (0, prompt), 0),
        Segment(tokens[prompt:], Role.RESPONSE, True, logprobs, (prompt, inputs), 0),
    )
    return Rollout(f"r{index}", f"p{index}", 0, FinishReason.STOP, segments, routes)
