"""A tiny random transformers model of every family, whose routers can use given routes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def qwen3_moe() -> Any:
    """Build a model with one dense layer and three with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_COMMON, **experts, head_dim=16, mlp_only_layers=[1])
    )


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=16))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_COMMON, num_local_experts=8, num_experts_per_tok=2))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN |= {"beta_fast": 2, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.3}


def deepseek_v3(q_rank: int | None = 20, n_group: int = 4, **more: Any) -> Any:
    """Build a model with one dense layer, two shared experts and values narrower than keys.

    q_rank: the rank of the queries; None for queries of full rank.
    n_group: groups of experts; a token uses half of them.
    more: further arguments of the configuration.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    changes = {
        "num_key_value_heads": 4,
        "q_lora_rank": q_rank,
        "kv_lora_rank": 24,
        "v_head_dim": 10,
    }
    changes |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "num_nextn_predict_layers": 0}
    changes |= {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
    }
    changes |= {"num_experts_per_tok": 4, "n_group": n_group, "topk_group": n_group // 2 or 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**(_COMMON | changes | more)))


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v3 whole queries, one group": functools.partial(deepseek_v3, None, 1),
    "deepseek_v3 YaRN": functools.partial(deepseek_v3, rope_parameters=YARN),
}


def randomize_weights(model: Any) -> Any:
    """Move float32 weights far from their initial values, and return the model.

    Routers' biases then change many choices.
    """
    generator = torch.Generator().manual_seed(3)
    model = model.float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model


def gates(model: Any) -> list[Any]:
    """Return the routers by layer."""
    return [
        layer.mlp.gate for layer in model.model.layers if "gate" in dict(layer.mlp.named_children())
    ]


def force_routes(model: Any, routes: torch.Tensor | None) -> None:
    """Make every router use `routes` [rows, MoE layers, topk]; None restores its own choice.

    The weights come from the router's scores. They follow the papers, independent of the
    implementations in transformers and in Megatron.
    """
    for layer, gate in enumerate(gates(model)):
        if routes is None:
            gate.__dict__.pop("forward", None)
        else:
            gate.forward = _FixedRoutes(gate, routes[:, layer].long(), model.config)


class _FixedRoutes:
    """The forward method of a router with fixed experts int64 [rows, topk]."""

    def __init__(self, gate: Any, experts: torch.Tensor, config: Any) -> None:
        self._gate = gate
        self._experts = experts
        self._config = config

    def __call__(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return logits [rows, experts], and weights and experts, both [rows, topk]."""
        rows = states.reshape(-1, states.shape[-1])
        logits = rows @ self._gate.weight.T
        has_sigmoid = self._config.model_type == "deepseek_v3"
        scores = logits.sigmoid() if has_sigmoid else logits.softmax(-1)
        weights = scores.gather(1, self._experts)
        weights = weights / weights.sum(1, keepdim=True)
        scaling = self._config.routed_scaling_factor if has_sigmoid else 1.0
        return logits, weights * scaling, self._experts
