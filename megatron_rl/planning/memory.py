"""Memory estimates of training ranks and engines, computed from the settings alone.

Weights, gradients and optimizer state are exact counts. Activations are estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.config.values import Dtype
from megatron_rl.models.parameter_count import (
    attention_parameters,
    dense_mlp_parameters,
    expert_parameters,
    num_parameters,
    shared_moe_parameters,
)
from megatron_rl.models.pipeline_split import PipelineSplit
from megatron_rl.models.shape import ModelShape

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
# Bytes per parameter. Gradients are reduced in float32.
_GRADIENT_BYTES = 4
# Adam has two moments in float32. A bfloat16 model has a float32 copy of the weights besides.
_MOMENT_BYTES = 8
_FLOAT32_COPY_BYTES = 4
# A checkpoint holds float32 weights and both moments. Megatron gathers them in the host's memory of
# every rank (`fully_reshardable`), and copies parts of them meanwhile.
_CHECKPOINT_BYTES = 12
_GATHERING_BYTES = 8
# Expert indices fit into one byte up to this number of experts, else they take two.
_MAX_ONE_BYTE_EXPERTS = 256
_ON_HOST = ("host_routes", "host_save")


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank of pipeline stage `stage` needs on its device.

    save: bytes that a save needs on the device beyond the activations and logits, which are freed
    before it.
    host_routes, host_save: bytes in the host's memory, for the routes of a batch and while a
    checkpoint is saved or loaded. All other fields are on the device.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    routes: int
    save: int
    host_routes: int
    host_save: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes on the device, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("stage", *_ON_HOST)
        }

    @property
    def total(self) -> int:
        """Bytes that must fit on the device."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each device of an engine.

    parameters: the device's share of the weights.
    kv_cache: cache of all requests that the engine runs at once.
    """

    parameters: int
    kv_cache: int

    @property
    def total(self) -> int:
        return self.parameters + self.kv_cache


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of one rank.

    dense: parameters replicated over data-parallel ranks.
    experts: parameters replicated over the data-parallel ranks of an expert.
    """

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def rank_parameters(shape: ModelShape, p: ParallelSettings, stage: int) -> RankParameters:
    """Count the parameters of a rank of a pipeline stage.

    Raises ValueError if the layers cannot be split like this.
    """
    layers = _layers(shape, p, stage)
    num_moe = len(set(layers) & set(shape.moe_layers))
    num_dense = len(layers) - num_moe
    modules = (
        (len(layers), attention_parameters(shape)),
        (num_dense, dense_mlp_parameters(shape)),
        (num_moe, shared_moe_parameters(shape)),
    )
    # Tensor parallelism splits some parameters over its ranks, and replicates the others.
    split = sum(count * module.split for count, module in modules)
    whole = sum(count * module.whole for count, module in modules)
    table = math.ceil(shape.vocab_size / p.tp) * shape.hidden_size
    is_first = stage == 0
    is_last = stage == p.pp - 1
    has_output_table = is_last and not (is_first and shape.tie_word_embeddings)
    num_tables = is_first + has_output_table
    final_norm = is_last * shape.hidden_size
    num_experts = num_moe * shape.num_experts
    return RankParameters(
        dense=split // p.tp + whole + num_tables * table + final_norm,
        experts=num_experts * expert_parameters(shape) // _expert_ranks(p),
    )


def rank_memory(c: Configuration, shape: ModelShape, *, world_size: int, stage: int) -> RankMemory:
    """Estimate the peak memory of a rank of a pipeline stage during a training step.

    Raises ValueError if the layers cannot be split over the stages.
    """
    p = c.parallel
    size = BYTES[c.model.dtype]
    parameters = rank_parameters(shape, p, stage)
    rows = math.ceil(_micro_batch_tokens(c) / p.cp)
    logits_rows = rows if stage == p.pp - 1 else 0
    # The distributed optimizer shares its state among the ranks with the same weights.
    dense_copies = world_size // (p.tp * p.pp)
    expert_copies = world_size // (_expert_ranks(p) * p.pp)
    optimizer_share = math.ceil(parameters.dense / dense_copies) + math.ceil(
        parameters.experts / expert_copies
    )
    routes, host_routes = _route_bytes(c, shape, world_size=world_size, stage=stage)
    activations = _activations(c, shape, rows, stage)
    logits = _logit_bytes(c, shape, logits_rows)
    device_save = _gather_bytes(c, parameters, dense_copies, expert_copies)
    return RankMemory(
        stage=stage,
        parameters=size * parameters.total,
        gradients=_GRADIENT_BYTES * parameters.total,
        optimizer=_optimizer_bytes(c.model.dtype) * optimizer_share,
        activations=activations,
        logits=logits,
        routes=routes,
        save=max(0, device_save - activations - logits),
        host_routes=host_routes,
        host_save=_save_bytes(c, parameters, optimizer_share),
    )


def _micro_batch_tokens(c: Configuration) -> int:
    """Return the input tokens of the largest micro-batch.

    A rollout beyond the budget is a micro-batch of its own. Its last token is no input.
    """
    longest_rollout = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    return max(c.train.tokens_per_micro_batch, longest_rollout - 1)


def _logit_bytes(c: Configuration, shape: ModelShape, rows: int) -> int:
    """Count the bytes of the logits, a copy of them, and their gradient."""
    return 3 * rows * math.ceil(shape.vocab_size / c.parallel.tp) * BYTES[c.model.dtype]


def _optimizer_bytes(dtype: Dtype) -> int:
    """Return the bytes of the optimizer's state for each parameter."""
    return _MOMENT_BYTES + (_FLOAT32_COPY_BYTES if dtype == "bfloat16" else 0)


def _save_bytes(c: Configuration, parameters: RankParameters, optimizer_share: int) -> int:
    """Count the bytes in the host's memory while a checkpoint is saved or loaded."""
    if not c.run.checkpoint_every:
        return 0 if c.run.resume == "never" else _CHECKPOINT_BYTES * parameters.total
    gathered_bytes = (_CHECKPOINT_BYTES + _GATHERING_BYTES) * parameters.total
    if not c.run.background_saves:
        return gathered_bytes
    # The rank copies the part that it writes.
    return gathered_bytes + (BYTES[c.model.dtype] + _CHECKPOINT_BYTES) * optimizer_share


def _gather_bytes(
    c: Configuration, parameters: RankParameters, dense_copies: int, expert_copies: int
) -> int:
    """Count the bytes on the device while Megatron gathers a buffer of the optimizer's state.

    It gathers one of weights and moments at a time, in float32, and sends a copy of its share.
    """
    if not c.run.checkpoint_every:
        return 0
    return max(
        4 * (count + math.ceil(count / copies))
        for count, copies in (
            (parameters.dense, dense_copies),
            (parameters.experts, expert_copies),
        )
    )


def _route_bytes(
    c: Configuration, shape: ModelShape, *, world_size: int, stage: int
) -> tuple[int, int]:
    """Count the bytes of a batch's routes on the device and in the host's memory.

    All micro-batches of a batch are packed at once.
    """
    p = c.parallel
    num_rollouts = c.rollout.prompts_per_step * c.rollout.samples_per_prompt
    max_tokens = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    rows = math.ceil(num_rollouts * p.tp * p.pp * p.cp / world_size) * max_tokens
    num_moe = len(set(_layers(shape, p, stage)) & set(shape.moe_layers))
    index_bytes = 1 if shape.num_experts <= _MAX_ONE_BYTE_EXPERTS else 2
    row_bytes = num_moe * shape.topk * index_bytes
    on_device = 0 if c.train.replay == "off" else math.ceil(rows / (p.cp * p.tp)) * row_bytes
    on_host = rows * row_bytes if c.train.replay == "rollout" else 0
    return on_device, on_host


def engine_memory(c: Configuration, shape: ModelShape) -> EngineMemory:
    """Count the bytes on each device of an engine.

    An engine also works with a smaller KV cache. SGLang then lets requests wait.
    """
    engine = c.engine
    size = BYTES[engine.dtype]
    tokens = engine.max_running_requests * (c.data.max_prompt_tokens + c.rollout.max_new_tokens)
    if engine.max_total_tokens is not None:
        tokens = min(tokens, engine.max_total_tokens)
    if shape.latent is not None:
        values_per_layer = shape.latent.kv_rank + shape.latent.rotary_dim
    else:
        values_per_layer = 2 * math.ceil(shape.num_key_value_heads / engine.tp) * shape.head_dim
    return EngineMemory(
        parameters=math.ceil(num_parameters(shape) / engine.tp) * size,
        kv_cache=tokens * shape.num_layers * values_per_layer * size,
    )


def _expert_ranks(p: ParallelSettings) -> int:
    """Return the number of ranks that share the experts of a layer."""
    return p.ep * (p.etp or p.default_etp)


def _layers(shape: ModelShape, p: ParallelSettings, stage: int) -> list[int]:
    split = PipelineSplit(
        shape.num_layers, p.pp, p.vpp or 1, p.first_stage_layers, p.last_stage_layers
    )
    return [layer for chunk in split.layers()[stage] for layer in chunk]


def _in_flight(p: ParallelSettings, stage: int) -> float:
    """Return the number of micro-batches that a stage holds until their backward pass.

    Interleaved chunks hold some more.
    """
    num_chunks = p.vpp or 1
    if num_chunks == 1:
        return p.pp - stage
    return p.pp * (1 + (p.pp - 1) / (p.pp * num_chunks))


def _activations(c: Configuration, shape: ModelShape, rows: int, stage: int) -> int:
    """Estimate the bytes that autograd saves in a stage's layers, as in arXiv 2205.05198.

    Full recomputation saves the input of each layer and everything in one layer. The estimate
    assumes that tokens are spread evenly over the experts.
    """
    p = c.parallel
    size = BYTES[c.model.dtype]
    layers = _layers(shape, p, stage)
    layer_values = [
        _layer_activations(shape, p, rows, is_moe=layer in shape.moe_layers) for layer in layers
    ]
    in_flight = _in_flight(p, stage)
    if c.model.recompute == "full":
        inputs = in_flight * len(layers) * (rows / p.tp) * shape.hidden_size
        return math.ceil(size * (inputs + max(layer_values)))
    return math.ceil(size * in_flight * sum(layer_values))


def _layer_activations(shape: ModelShape, p: ParallelSettings, rows: int, *, is_moe: bool) -> float:
    """Estimate the number of values that autograd saves in one layer."""
    width = shape.hidden_size
    split_rows = rows / p.tp  # sequence parallelism
    attention_values = 2 * split_rows * width + _attention_values(shape, rows) / p.tp
    if not is_moe:
        dense = 2 * split_rows * width + 3 * rows * shape.ffn_hidden_size / p.tp
        return attention_values + dense
    routed_experts = split_rows * shape.topk * (2 * width + 3 * shape.moe_ffn_hidden_size)
    shared_expert = 3 * rows * shape.shared_ffn_hidden_size / p.tp
    return attention_values + (2 * split_rows * width + routed_experts + shared_expert)


def _attention_values(shape: ModelShape, rows: int) -> int:
    """Count queries, keys and values before and after rotation, and the output."""
    heads = shape.num_attention_heads
    groups = shape.num_key_value_heads
    latent = 0
    if shape.latent is not None:
        latent = (shape.latent.q_rank or 0) + 2 * shape.latent.kv_rank
    per_row = 2 * (heads + 2 * groups) * shape.head_dim + heads * shape.head_dim + latent
    return rows * per_row
