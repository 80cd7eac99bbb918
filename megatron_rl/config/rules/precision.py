"""Number formats: the machine has kernels for them, and the engine's is no wider than the trainer's."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import EngineConfig, ModelConfig


def check_precision(model: ModelConfig, engine: EngineConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    """float32 training on CPU. Weights are exported in the engine's dtype: bfloat16 rollouts of float32 are allowed."""
    if facts.num_gpus == 0 and model.dtype != "float32":
        rule = "Without a GPU only float32 is trained"
        yield Refusal("model.dtype", model.dtype, rule, "Use model.dtype=float32")
    if engine.dtype == "float32" and model.dtype == "bfloat16":
        rule = "It is wider than model.dtype=bfloat16: rollouts would follow another policy than the one trained"
        yield Refusal("engine.dtype", engine.dtype, rule, "Use engine.dtype=bfloat16")
