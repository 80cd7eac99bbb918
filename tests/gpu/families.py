"""Tiny random transformers models, one of each family that the trainer loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
            norm_topk_prob=True, mlp_only_layers=[1], rope_theta=10000.0, max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False,
            rms_norm_eps=1e-6, eos_token_id=1,
        )
    )  # fmt: skip


def _randomized(make: Callable[[], Any]) -> Callable[[], Any]:
    """In float32, its weights far from their initial values."""

    def made() -> Any:
        generator, model = torch.Generator().manual_seed(3), make().float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        return model

    return made


FAMILIES: dict[str, Callable[[], Any]] = {"qwen3_moe": _randomized(_qwen3_moe)}
