"""Number formats: those of trainer and engine agree, and the machine has kernels for them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import EngineConfig, ModelConfig


def check_precision(model: ModelConfig, engine: EngineConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    """float32 on CPU; one dtype on both sides of a weight sync, because its audit compares values."""
    if facts.num_gpus == 0 and model.dtype != "float32":
        rule = "Without a GPU only float32 is trained"
        yield Refusal("model.dtype", model.dtype, rule, "Use model.dtype=float32 engine.dtype=float32")
    if engine.dtype != model.dtype:
        rule = f"It differs from model.dtype={model.dtype}, and a weight sync's audit compares values"
        yield Refusal("engine.dtype", engine.dtype, rule, "Use engine.dtype=${model.dtype}")
