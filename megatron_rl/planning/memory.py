"""How many bytes a rank and an engine need, from the settings alone.

Weights are counted, activations estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.config.values import Dtype
from megatron_rl.models.parameter_count import (
    attention,
    beside_experts,
    dense_mlp,
    num_parameters,
    one_expert,
)
from megatron_rl.models.pipeline_split import PipelineSplit
from megatron_rl.models.shape import ModelShape

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
_GRADIENT = 4  # reduced in float32
_MOMENTS = 8  # Adam's two, float32; a bfloat16 model keeps its weights in float32 beside them
_WIDE_EXPERTS = 256
_ON_HOST = ("host_routes", "host_save")
# float32 weights and both moments, which Megatron gathers on every rank (`fully_reshardable`)
_SAVED = 12


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of a rank of pipeline stage `stage`.

    host_routes, host_save: in its host's memory, for a batch and while a checkpoint is saved.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    routes: int
    host_routes: int
    host_save: int

    @property
    def parts(self) -> dict[str, int]:
        """What lies on the device, by name."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("stage", *_ON_HOST)
        }

    @property
    def total(self) -> int:
        """What must fit on the device."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each device of an engine: its share of the weights, and a KV cache for all that it
    is asked at once.
    """

    parameters: int
    kv_cache: int

    @property
    def total(self) -> int:
        return self.parameters + self.kv_cache


@dataclass(frozen=True)
class Held:
    """Parameters of one rank.

    dense: replicated over data-parallel ranks; experts: over those of expert parallelism.
    """

    dense: int
    experts: int


def held_parameters(shape: ModelShape, p: ParallelSettings, stage: int) -> Held:
    """What a rank of a pipeline stage holds.

    Raises ValueError where the layers cannot be split so.
    """
    layers = _layers(shape, p, stage)
    moe = len(set(layers) & set(shape.moe_layers))
    split = len(layers) * attention(shape).split
    split += (len(layers) - moe) * dense_mlp(shape).split + moe * beside_experts(shape).split
    whole = len(layers) * attention(shape).whole
    whole += (len(layers) - moe) * dense_mlp(shape).whole + moe * beside_experts(shape).whole
    table = math.ceil(shape.vocab_size / p.tp) * shape.hidden_size
    first, last = stage == 0, stage == p.pp - 1
    tables = first + (last and not (first and shape.tie_word_embeddings))
    dense = split // p.tp + whole + tables * table + last * shape.hidden_size
    return Held(
        dense, moe * shape.num_experts * one_expert(shape) // (p.ep * (p.etp or p.default_etp))
    )


def rank_memory(c: Configuration, shape: ModelShape, *, world_size: int, stage: int) -> RankMemory:
    """The largest need of a rank of a pipeline stage during a training step."""
    p, size = c.parallel, BYTES[c.model.dtype]
    held = held_parameters(shape, p, stage)
    layers = _layers(shape, p, stage)
    moe = len(set(layers) & set(shape.moe_layers))
    rows = math.ceil(c.train.tokens_per_micro_batch / p.cp)
    adam = _MOMENTS + (4 if c.model.dtype == "bfloat16" else 0)
    dense_copies = world_size // (
        p.tp * p.pp
    )  # the distributed optimizer shares its state among these
    expert_copies = world_size // (p.ep * (p.etp or p.default_etp) * p.pp)
    width = shape.topk * (1 if shape.num_experts <= _WIDE_EXPERTS else 2)
    rollouts = c.rollout.prompts_per_step * c.rollout.samples_per_prompt
    longest = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    batch_rows = math.ceil(rollouts * p.tp * p.pp * p.cp / world_size) * longest
    routes = moe * width if c.train.replay != "off" else 0
    on_last = stage == p.pp - 1
    shared = math.ceil(held.dense / dense_copies) + math.ceil(held.experts / expert_copies)
    copied = (size + _SAVED) * shared if c.run.background_saves else 0  # of what this rank writes
    return RankMemory(
        stage=stage,
        parameters=size * (held.dense + held.experts),
        gradients=_GRADIENT * (held.dense + held.experts),
        optimizer=adam * shared,
        activations=_activations(c, shape, rows, stage),
        logits=3 * rows * math.ceil(shape.vocab_size / p.tp) * size
        if on_last
        else 0,  # they, a copy, their gradient
        routes=math.ceil(batch_rows / (p.cp * p.tp))
        * routes,  # all micro-batches of a batch are packed at once
        host_routes=batch_rows * routes if c.train.replay == "rollout" else 0,
        host_save=_SAVED * (held.dense + held.experts) + copied if c.run.checkpoint_every else 0,
    )


def engine_memory(c: Configuration, shape: ModelShape) -> EngineMemory:
    """Of each of an engine's devices.

    A smaller KV cache works too: SGLang then lets requests wait.
    """
    engine, size = c.engine, BYTES[c.engine.dtype]
    tokens = engine.max_running_requests * (c.data.max_prompt_tokens + c.rollout.max_new_tokens)
    if engine.max_total_tokens is not None:
        tokens = min(tokens, engine.max_total_tokens)
    if shape.latent is not None:
        each = shape.latent.kv_rank + shape.latent.rotary_dim
    else:
        each = 2 * math.ceil(shape.num_key_value_heads / engine.tp) * shape.head_dim
    return EngineMemory(
        math.ceil(num_parameters(shape) / engine.tp) * size, tokens * shape.num_layers * each * size
    )


def _layers(shape: ModelShape, p: ParallelSettings, stage: int) -> list[int]:
    split = PipelineSplit(
        shape.num_layers, p.pp, p.vpp or 1, p.first_stage_layers, p.last_stage_layers
    )
    return [layer for chunk in split.layers()[stage] for layer in chunk]


def _in_flight(p: ParallelSettings, stage: int) -> float:
    """How many micro-batches a stage keeps until their backward pass; interleaved chunks keep some
    more.
    """
    chunks = p.vpp or 1
    return p.pp - stage if chunks == 1 else p.pp * (1 + (p.pp - 1) / (p.pp * chunks))


def _activations(c: Configuration, shape: ModelShape, rows: int, stage: int) -> int:
    """An estimate of what autograd keeps of a stage's layers, in the manner of arXiv 2205.05198.

    Recomputing whole layers keeps their inputs, and all of one layer. Experts are taken to be used
    evenly.
    """
    p, hidden, size = c.parallel, shape.hidden_size, BYTES[c.model.dtype]
    own_rows = rows / p.tp  # sequence parallelism
    heads, groups, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    latent = 0 if shape.latent is None else (shape.latent.q_rank or 0) + 2 * shape.latent.kv_rank
    inside = (
        rows * (2 * (heads + 2 * groups) * dim + heads * dim + latent) / p.tp
    )  # before and after rotation, output
    attended = 2 * own_rows * hidden + inside
    dense = 2 * own_rows * hidden + 3 * rows * shape.ffn_hidden_size / p.tp
    routed = own_rows * shape.topk * (2 * hidden + 3 * shape.moe_ffn_hidden_size)
    experts = 2 * own_rows * hidden + routed + 3 * rows * shape.shared_ffn_hidden_size / p.tp
    layers = _layers(shape, p, stage)
    each = [attended + (experts if layer in shape.moe_layers else dense) for layer in layers]
    if c.model.recompute == "full":
        return math.ceil(
            size * (_in_flight(p, stage) * len(layers) * own_rows * hidden + max(each))
        )
    return math.ceil(size * _in_flight(p, stage) * sum(each))
