"""Megatron's grid: it fills the world, and the model can be split that way.

Dense grid: world = tp x cp x pp x dp. Expert grid: world = etp x ep x pp x (expert data parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import EngineConfig, ParallelConfig
from megatron_rl.mcore.hf_config import MoeModelConfig

_FP8_BLOCK = 128


def check_grid(parallel: ParallelConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    """Both grids divide the number of ranks; features that need each other come together."""
    yield from _check_world(parallel, facts)
    if parallel.sequence_parallel and parallel.tp == 1:
        rule = "Sequence parallelism splits over the tensor-parallel ranks, and parallel.tp=1"
        yield Refusal("parallel.sequence_parallel", True, rule, "Set it to false, or raise parallel.tp")
    if parallel.tp > 1 and not parallel.sequence_parallel:
        rule = "Megatron's MoE layers need sequence parallelism when parallel.tp > 1"
        yield Refusal("parallel.sequence_parallel", False, rule, "Set parallel.sequence_parallel=true")
    if parallel.vpp is not None and parallel.vpp > 1 and parallel.pp == 1:
        rule = "Virtual stages interleave real ones, and parallel.pp=1"
        yield Refusal("parallel.vpp", parallel.vpp, rule, "Leave it null, or raise parallel.pp")
    if parallel.cp > 1 and facts.num_gpus == 0:
        rule = "Context parallelism needs Transformer Engine's attention, and no GPU is visible here"
        yield Refusal("parallel.cp", parallel.cp, rule, "Use parallel.cp=1 on CPU")


def _check_world(parallel: ParallelConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    dense = parallel.tp * parallel.cp * parallel.pp
    expert = parallel.etp * parallel.ep * parallel.pp
    for key, value, size, names in (
        ("parallel.tp", parallel.tp, dense, "parallel.tp x cp x pp"),
        ("parallel.ep", parallel.ep, expert, "parallel.etp x ep x pp"),
    ):
        if facts.world_size % size:
            rule = f"{names} = {size} does not divide the {facts.world_size} rank(s) of this job"
            remedy = f"Start a multiple of {size} ranks (torchrun --nproc-per-node {size}), or choose smaller sizes"
            yield Refusal(key, value, rule, remedy)


def check_model_split(parallel: ParallelConfig, engine: EngineConfig, model: MoeModelConfig) -> Iterator[Refusal]:
    """Every part of the model divides evenly among those that share it, in the trainer and in the engine."""
    stages = parallel.pp * (parallel.vpp or 1)
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
    if model.num_layers % stages:
        rule = f"The model's {model.num_layers} layers cannot be split evenly over pp x vpp = {stages} stages"
        yield Refusal("parallel.pp", parallel.pp, rule, f"parallel.pp x vpp must divide {model.num_layers}")
    yield from _check_fp8_blocks(engine, model)


def _check_fp8_blocks(engine: EngineConfig, model: MoeModelConfig) -> Iterator[Refusal]:
    width = model.moe_ffn_hidden_size * engine.ep // engine.tp
    if engine.quantization == "fp8" and width % _FP8_BLOCK:
        rule = f"Each engine rank gets {width} columns of an expert, which blocks of {_FP8_BLOCK} do not divide"
        yield Refusal("engine.quantization", "fp8", rule, "Spread whole experts instead: engine.ep=${engine.tp}")
