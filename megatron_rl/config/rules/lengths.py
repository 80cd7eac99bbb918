"""A prompt and its response fit the model's positions and an engine's memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import DataConfig, EngineConfig, RolloutConfig
from megatron_rl.models.qwen3_moe import ModelShape


def check_lengths(
    data: DataConfig, rollout: RolloutConfig, engine: EngineConfig, model: ModelShape
) -> Iterator[Refusal]:
    """The longest sequence that may occur fits everywhere."""
    # SGLang keeps two positions of a sequence and seven behind a prompt: beyond, it truncates or refuses requests.
    longest = max(data.max_prompt_tokens + rollout.max_new_tokens + 2, data.max_prompt_tokens + 7)
    said = f"data.max_prompt_tokens={data.max_prompt_tokens} + rollout.max_new_tokens={rollout.max_new_tokens}"
    if longest > model.max_position_embeddings:
        rule = f"{said} and what SGLang keeps free exceed the model's {model.max_position_embeddings} positions"
        yield Refusal("rollout.max_new_tokens", rollout.max_new_tokens, rule, "Lower one of the two")
    if engine.mode == "managed" and engine.max_total_tokens < longest:
        rule = f"One sequence may take {longest} slots ({said}, and what SGLang keeps free)"
        yield Refusal("engine.max_total_tokens", engine.max_total_tokens, rule, f"Give at least {longest}")
