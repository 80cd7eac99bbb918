"""Memory estimates of training ranks and engines, computed from the settings alone.

Weights, gradients and optimizer state are exact counts. Activations are estimates.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from dataclasses import dataclass, fields

from megatron_rl.config.schema import Configuration, EngineSettings, ParallelSettings
from megatron_rl.config.values import Dtype
from megatron_rl.contracts.launch_facts import has_transformer_engine
from megatron_rl.models.fp8_weights import BLOCK
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
# Of a weight in FP8, with its share of the float32 scale of its block
_FP8_BYTES = 1 + 4 / BLOCK**2
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
# Values of the width inside a feed-forward layer: gate and input, copies of both, their product.
# An expert multiplies the product by its weight.
_DENSE_COPIES = 5
_EXPERT_COPIES = 6
# Rows on their way to experts and back: in both orders. Other ranks receive and return copies.
_LOCAL_ROUTED_COPIES = 2
_SENT_ROUTED_COPIES = 2
# Cosines and sines, for queries and for keys.
_ROTARY_COPIES = 4
_ROUTER_BYTES = 4
_LOGIT_COPIES = 2
# The first torch whose variable-length attention takes fewer keys and values than queries
_GROUPED_ATTENTION = (2, 12)
_ON_HOST = ("host_routes", "host_save", "host_reference")


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank of pipeline stage `stage` needs on its device.

    activations: what a stage keeps until its backward passes, and the peak of one layer's backward
    pass. logits: what the logits take beyond that peak; they are freed before it.
    export, save: bytes that an export and a save need on the device beyond the activations and
    logits, which are freed before them. save: bytes beyond an export's.
    host_routes, host_save: bytes in the host's memory, for the routes of a batch and while a
    checkpoint is saved or loaded. host_reference: bytes there for the weights of the KL penalty's
    reference. All other fields are on the device.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    routes: int
    export: int
    save: int
    host_routes: int
    host_save: int
    host_reference: int = 0

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
    parameters = rank_parameters(shape, p, stage)
    rows = math.ceil(_micro_batch_tokens(c) / p.cp)
    logits_rows = rows if stage == p.pp - 1 else 0
    # The distributed optimizer shares its state among the ranks with the same weights.
    dense_copies = world_size // (p.tp * p.pp)
    expert_copies = world_size // (_expert_ranks(p) * p.pp)
    optimizer_share = _share(parameters, dense_copies, expert_copies)
    routes, host_routes = _route_bytes(c, shape, world_size=world_size, stage=stage)
    activations, logits = _activations(c, shape, rows, stage, logits_rows)
    device_save = _gather_bytes(c, parameters, dense_copies, expert_copies)
    forward = activations + logits
    device_export = max(forward, _export_bytes(c, shape, stage))
    return RankMemory(
        stage=stage,
        parameters=_weight_bytes(c, parameters),
        gradients=_GRADIENT_BYTES * parameters.total,
        optimizer=_optimizer_bytes(c.model.dtype) * optimizer_share,
        activations=activations,
        logits=logits,
        routes=routes,
        export=device_export - forward,
        save=max(0, device_save - device_export),
        host_routes=host_routes,
        host_save=_save_bytes(c, parameters, optimizer_share),
        host_reference=_weight_bytes(c, parameters) if c.algo.kl.coef else 0,
    )


def resting_bytes(
    c: Configuration, shape: ModelShape, *, world_size: int, stage: int, buckets: int
) -> int:
    """Count the bytes that a rank keeps between updates, while weights are sent or saved.

    buckets: bytes of the buckets in which weights travel.
    """
    p = c.parallel
    parameters = rank_parameters(shape, p, stage)
    dense_copies = world_size // (p.tp * p.pp)
    expert_copies = world_size // (_expert_ranks(p) * p.pp)
    optimizer_share = _share(parameters, dense_copies, expert_copies)
    return (
        _weight_bytes(c, parameters)
        + _GRADIENT_BYTES * parameters.total
        + _optimizer_bytes(c.model.dtype) * optimizer_share
        + max(
            _gather_bytes(c, parameters, dense_copies, expert_copies),
            _export_bytes(c, shape, stage) + buckets,
        )
    )


def _weight_bytes(c: Configuration, parameters: RankParameters) -> int:
    return BYTES[c.model.dtype] * parameters.total


def _share(parameters: RankParameters, dense_copies: int, expert_copies: int) -> int:
    """Return the number of parameters whose optimizer state a rank holds."""
    dense = math.ceil(parameters.dense / dense_copies)
    return dense + math.ceil(parameters.experts / expert_copies)


def _micro_batch_tokens(c: Configuration) -> int:
    """Return the input tokens of the largest micro-batch.

    A rollout beyond the budget is a micro-batch of its own. Its last token is no input.
    """
    longest_rollout = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    return max(c.train.tokens_per_micro_batch, longest_rollout - 1)


def _logit_bytes(c: Configuration, shape: ModelShape, rows: int) -> float:
    """Count the bytes of the logits and a copy of them, and of the norm before.

    Their gradients take the places of both.
    """
    size = BYTES[c.model.dtype]
    logits = _LOGIT_COPIES * rows * math.ceil(shape.vocab_size / c.parallel.tp) * size
    norm = _input_bytes(size) + _norm_bytes(size) + size
    return logits + rows / c.parallel.tp * shape.hidden_size * norm


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


def _export_bytes(c: Configuration, shape: ModelShape, stage: int) -> int:
    """Count the bytes on the device while an end stage joins the shards of its vocabulary table.

    It holds the shards of all ranks and the whole table.
    """
    p = c.parallel
    if p.tp == 1 or 0 < stage < p.pp - 1:
        return 0
    return 2 * shape.vocab_size * shape.hidden_size * BYTES[c.model.dtype]


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
    fp8_parameters = _quantized_parameters(engine, shape)
    tokens = engine.max_running_requests * (c.data.max_prompt_tokens + c.rollout.max_new_tokens)
    if engine.max_total_tokens is not None:
        tokens = min(tokens, engine.max_total_tokens)
    if shape.latent is not None:
        values_per_layer = shape.latent.kv_rank + shape.latent.rotary_dim
    else:
        values_per_layer = 2 * math.ceil(shape.num_key_value_heads / engine.tp) * shape.head_dim
    return EngineMemory(
        parameters=math.ceil((num_parameters(shape) - fp8_parameters) / engine.tp) * size
        + math.ceil(fp8_parameters * _FP8_BYTES / engine.tp),
        kv_cache=tokens * shape.num_layers * values_per_layer * size,
    )


def _quantized_parameters(engine: EngineSettings, shape: ModelShape) -> int:
    """Count the parameters that an engine holds in FP8."""
    if engine.quantization is None:
        return 0
    end = shape.num_layers - engine.unquantized_last_layers
    layers = range(engine.unquantized_first_layers, end)
    return sum(_matrix_parameters(shape, layer) for layer in layers)


def _matrix_parameters(shape: ModelShape, layer: int) -> int:
    """Count the matrices of a layer, without its router."""
    attention = attention_parameters(shape).split
    if layer not in shape.moe_layers:
        return attention + dense_mlp_parameters(shape).split
    experts = shape.num_experts * expert_parameters(shape)
    return attention + shared_moe_parameters(shape).split + experts


def _expert_ranks(p: ParallelSettings) -> int:
    """Return the number of ranks that share the experts of a layer."""
    return p.ep * (p.etp or p.default_etp)


def _layers(shape: ModelShape, p: ParallelSettings, stage: int) -> list[int]:
    split = PipelineSplit.balanced(shape.num_layers, p.pp, p.vpp or 1)
    return [layer for chunk in split.layers()[stage] for layer in chunk]


def _in_flight(p: ParallelSettings, stage: int) -> float:
    """Return the number of micro-batches that a stage holds until their backward pass.

    A stage with interleaved chunks runs (v - 1) p + 2 (p - stage - 1) passes of a chunk ahead, and
    holds one more.
    """
    num_chunks = p.vpp or 1
    if num_chunks == 1:
        return p.pp - stage
    passes = (num_chunks - 1) * p.pp + 2 * (p.pp - stage - 1) + 1
    return passes / num_chunks


def _activations(
    c: Configuration, shape: ModelShape, rows: int, stage: int, logits_rows: int
) -> tuple[int, int]:
    """Estimate the bytes of the activations, and of the logits beyond a layer's peak."""
    layer_peak = _layer_peak(c, shape, rows, stage)
    activations = math.ceil(_held_layers(c, shape, rows, stage) + layer_peak)
    return activations, max(0, math.ceil(_logit_bytes(c, shape, logits_rows) - layer_peak))


def _held_layers(c: Configuration, shape: ModelShape, rows: int, stage: int) -> float:
    """Estimate the bytes that a stage keeps until the backward passes of its micro-batches.

    Full recomputation keeps the input of each layer and the output of the last one.
    """
    p = c.parallel
    layers = _layers(shape, p, stage)
    in_flight = _in_flight(p, stage)
    if c.model.recompute == "full":
        boundaries = len(layers) + (p.vpp or 1)
        row_bytes = shape.hidden_size * BYTES[c.model.dtype]
        return in_flight * boundaries * (rows / p.tp) * row_bytes
    return in_flight * sum(
        _saved_bytes(c, shape, rows, is_moe=layer in shape.moe_layers) for layer in layers
    )


def _layer_peak(c: Configuration, shape: ModelShape, rows: int, stage: int) -> float:
    """Estimate the bytes that one layer's backward pass takes beyond what the stage keeps.

    It takes most when it begins. Full recomputation then also holds what the layer saved.
    """
    size = BYTES[c.model.dtype]
    peaks = []
    for layer in set(_layers(shape, c.parallel, stage)):
        is_moe = layer in shape.moe_layers
        peak = _passing_bytes(c, shape, rows, is_moe=is_moe)
        if c.model.recompute == "full":
            # The stage keeps the input of the layer already.
            layer_input = rows / c.parallel.tp * shape.hidden_size * _input_bytes(size)
            peak += _saved_bytes(c, shape, rows, is_moe=is_moe) - layer_input
        peaks.append(peak)
    return max(peaks)


def _saved_bytes(c: Configuration, shape: ModelShape, rows: int, *, is_moe: bool) -> float:
    """Estimate the bytes that autograd saves in one layer of the `local` spec.

    The estimate assumes that tokens are spread evenly over the experts. Every line was compared
    with a rehearsal (tests/launch/rehearsal/test_memory_estimates.py).
    """
    p = c.parallel
    size = BYTES[c.model.dtype]
    split_rows = rows / p.tp  # sequence parallelism
    width = shape.hidden_size
    norms = 2 * split_rows * width * (_input_bytes(size) + _norm_bytes(size) + size)
    if not is_moe:
        inner = _DENSE_COPIES * rows * shape.ffn_hidden_size / p.tp
        return norms + _attention_bytes(c, shape, rows) + size * inner
    routed_rows = split_rows * shape.topk
    expert_ranks = p.etp or p.default_etp
    experts = routed_rows * (expert_ranks * width + _EXPERT_COPIES * shape.moe_ffn_hidden_size)
    shared_expert = _DENSE_COPIES * rows * shape.shared_ffn_hidden_size / p.tp
    router = 2 * _ROUTER_BYTES * split_rows * shape.num_experts
    return norms + _attention_bytes(c, shape, rows) + size * (experts + shared_expert) + router


def _passing_bytes(c: Configuration, shape: ModelShape, rows: int, *, is_moe: bool) -> float:
    """Estimate the bytes that live during a layer's backward pass and are not saved.

    Each row has two gradients, the sum after attention and, with experts, their sum. Each routed
    row is there in the order of experts and in the order of tokens. With expert parallelism it is
    also there as it arrives and as it returns.
    """
    split_rows = rows / c.parallel.tp
    values = (3 + is_moe) * split_rows * shape.hidden_size
    if is_moe:
        copies = _LOCAL_ROUTED_COPIES + (_SENT_ROUTED_COPIES if c.parallel.ep > 1 else 0)
        values += copies * split_rows * shape.topk * shape.hidden_size
    return values * BYTES[c.model.dtype]


def _norm_bytes(size: int) -> int:
    """Return the bytes of each value inside an RMSNorm, which computes in float32.

    They are the normalized value and a copy of one of lower precision.
    """
    return 4 if size == 4 else 8


def _input_bytes(size: int) -> int:
    """Return the bytes of each value that an RMSNorm keeps of its input.

    Of an input in lower precision it keeps the copy that `_norm_bytes` counts.
    """
    return 4 if size == 4 else 0


def _attention_bytes(c: Configuration, shape: ModelShape, rows: int) -> float:
    """Estimate the bytes of queries, keys, values and outputs that one layer saves."""
    size = BYTES[c.model.dtype]
    heads = shape.num_attention_heads * shape.head_dim
    groups = shape.num_key_value_heads * shape.head_dim
    per_row = 0.0
    if shape.latent is not None:
        per_row += size * ((shape.latent.q_rank or 0) + 2 * shape.latent.kv_rank)
    if shape.qk_norm:
        # Keys are normalized where the projection wrote them, queries are copied first.
        per_row += _norm_bytes(size) * (heads + groups) + _input_bytes(size) * heads
    if size == 2 and c.parallel.cp == 1:
        # Variable-length attention: queries and keys after rotation, values, outputs
        per_row += size * (2 * heads + 2 * (heads if _repeats_groups(c) else groups))
    else:
        # Padded attention: the projection, then queries, keys and values of all heads in padded
        # sequences, outputs there and outputs in packed order
        per_row += size * (heads + 2 * groups + 5 * heads)
    rotary_dim = shape.head_dim if shape.latent is None else shape.latent.rotary_dim
    return rows * (per_row / c.parallel.tp + _ROTARY_COPIES * size * rotary_dim)


def _repeats_groups(c: Configuration) -> bool:
    """True if attention keeps the keys and values of a group once for each of its queries."""
    is_local = c.model.spec == "local" or (c.model.spec is None and not has_transformer_engine())
    return is_local and not torch_takes_groups()


@functools.cache
def torch_takes_groups() -> bool:
    """True if the installed torch's variable-length attention takes grouped queries.

    For an earlier torch, `mcore/layers/varlen_attention.py` repeats keys and values.
    """
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return (int(major), int(minor)) >= _GROUPED_ATTENTION
