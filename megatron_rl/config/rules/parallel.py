"""Megatron's grid: it fills the world, and the model can be split that way."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import EngineConfig, ParallelConfig
from megatron_rl.models.qwen3_moe import ModelShape

_FP8_BLOCK = 128


def check_grid(parallel: ParallelConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    """Both grids divide the number of ranks; features that need each other come together; none is half built."""
    yield from _check_world(parallel, facts)
    yield from _check_unsupported(parallel)
    if parallel.sequence_parallel and parallel.tp == 1:
        rule = "Sequence parallelism splits over the tensor-parallel ranks, and parallel.tp=1"
        yield Refusal("parallel.sequence_parallel", True, rule, "Set it to false, or raise parallel.tp")
    if parallel.tp > 1 and not parallel.sequence_parallel:
        rule = "Megatron's MoE layers need sequence parallelism when parallel.tp > 1"
        yield Refusal("parallel.sequence_parallel", False, rule, "Set parallel.sequence_parallel=true")


def _check_unsupported(parallel: ParallelConfig) -> Iterator[Refusal]:
    if parallel.pp > 1:
        rule = "Weights of several pipeline stages cannot be sent to engines yet"
        yield Refusal("parallel.pp", parallel.pp, rule, "Use parallel.pp=1; parallel.tp and ep split the model too")
    if parallel.vpp is not None and parallel.vpp > 1:
        rule = "Virtual stages interleave pipeline stages, of which there is only one"
        yield Refusal("parallel.vpp", parallel.vpp, rule, "Leave it null")
    if parallel.cp > 1:
        rule = "Batches are not split over context-parallel ranks yet"
        yield Refusal("parallel.cp", parallel.cp, rule, "Use parallel.cp=1; parallel.tp shortens what a rank holds")


def _check_world(parallel: ParallelConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    for key, value, size, names in (
        ("parallel.tp", parallel.tp, parallel.tp, "parallel.tp"),
        ("parallel.ep", parallel.ep, parallel.etp * parallel.ep, "parallel.etp x ep"),
    ):
        if facts.world_size % size:
            rule = f"{names} = {size} does not divide the {facts.world_size} rank(s) of this job"
            remedy = f"Start a multiple of {size} ranks (torchrun --nproc-per-node {size}), or choose smaller sizes"
            yield Refusal(key, value, rule, remedy)


def check_model_split(parallel: ParallelConfig, engine: EngineConfig, model: ModelShape) -> Iterator[Refusal]:
    """Every part of the model divides evenly among those that share it, in the trainer and in the engine."""
    splits = (
        ("parallel.ep", parallel.ep, "expert", model.num_experts),
        ("parallel.etp", parallel.etp, "column of an expert's hidden layer", model.moe_ffn_hidden_size),
        ("parallel.tp", parallel.tp, "attention head", model.num_attention_heads),
        ("parallel.tp", parallel.tp, "key-value head", model.num_key_value_heads),
        ("engine.ep", engine.ep, "expert", model.num_experts),
        ("engine.tp", engine.tp, "attention head", model.num_attention_heads),
    )
    for key, value, part, count in splits:
        if count % value:
            rule = f"The model's {count} {part}s cannot be split evenly over {value}"
            yield Refusal(key, value, rule, f"Use a divisor of {count}")
    yield from _check_fp8_blocks(engine, model)


def _check_fp8_blocks(engine: EngineConfig, model: ModelShape) -> Iterator[Refusal]:
    width = model.moe_ffn_hidden_size * engine.ep // engine.tp
    if engine.quantization == "fp8" and width % _FP8_BLOCK:
        rule = f"Each engine rank gets {width} columns of an expert, which blocks of {_FP8_BLOCK} do not divide"
        yield Refusal("engine.quantization", "fp8", rule, "Spread whole experts instead: engine.ep=${engine.tp}")
