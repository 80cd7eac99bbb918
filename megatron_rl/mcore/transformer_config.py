"""Builds Megatron's `TransformerConfig` from a model's shape and the settings."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.layer_spec import resolve_spec, spec_options
from megatron_rl.mcore.parallel import expert_tensor_size
from megatron_rl.models.pipeline_split import PipelineSplit
from megatron_rl.models.shape import LatentAttention, ModelShape, Yarn


def transformer_config(
    shape: ModelShape, model: ModelSettings, parallel: ParallelSettings, *, on_gpu: bool
) -> TransformerConfig:
    """Return Megatron's configuration of the model.

    It is a `MLATransformerConfig` for multi-head latent attention.

    on_gpu: initialize weights on the GPU.
    """
    config_class = TransformerConfig if shape.latent is None else MLATransformerConfig
    return config_class(
        **_attention(shape),
        **_latent(shape),
        **_mlp(shape),
        **_experts(shape),
        **_training(shape, model),
        **_parallelism(shape, parallel),
        **_machine(shape, on_gpu=on_gpu, uses_te=resolve_spec(model) == "te"),
        **spec_options(model),
    )


def _attention(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "qk_layernorm": shape.qk_norm or shape.latent is not None,
        "attention_softmax_in_fp32": True,
    }


def _latent(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of multi-head latent attention and its own rotary embedding."""
    latent = shape.latent
    if latent is None:
        return {}
    rope = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if latent.yarn is not None:
        rope = _yarn(latent.yarn)
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": shape.rope_theta,
        **rope,
    }


def _yarn(yarn: Yarn) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def _mlp(shape: ModelShape) -> dict[str, Any]:
    return {
        "ffn_hidden_size": shape.ffn_hidden_size,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def _experts(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of layers with experts.

    Balancing and dropping of tokens are off, because they would change the engine's routes.
    """
    if not shape.moe_layers:
        return {"moe_layer_freq": [0] * shape.num_layers}
    router = shape.router
    return {
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shape.shared_ffn_hidden_size or None,
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": [int(i in shape.moe_layers) for i in range(shape.num_layers)],
        "moe_router_topk": shape.topk,
        "moe_router_pre_softmax": not router.normalizes_weights,
        "moe_router_score_function": router.score,
        "moe_router_topk_scaling_factor": None if router.scaling == 1 else router.scaling,
        "moe_router_num_groups": router.groups if router.groups > 1 else None,
        "moe_router_group_topk": router.group_topk if router.groups > 1 else None,
        "moe_router_enable_expert_bias": router.bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


def _training(shape: ModelShape, model: ModelSettings) -> dict[str, Any]:
    dtype = torch_dtype(model.dtype)
    recompute_layers = model.recompute == "full"
    recompute_modules = None
    if model.recompute_modules is not None:
        recompute_modules = list(model.recompute_modules)
    return {
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "attention_dropout": 0.0,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": shape.initializer_range,
        "embedding_init_method_std": shape.embedding_initializer_range,
        "recompute_granularity": None if model.recompute == "none" else model.recompute,
        "recompute_modules": recompute_modules,
        "recompute_method": "uniform" if recompute_layers else None,
        "recompute_num_layers": 1 if recompute_layers else None,
    }


def _parallelism(shape: ModelShape, parallel: ParallelSettings) -> dict[str, Any]:
    chunks = parallel.vpp or 1
    split = PipelineSplit.balanced(shape.num_layers, parallel.pp, chunks)
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "num_layers_in_first_pipeline_stage": split.first,
        "num_layers_in_last_pipeline_stage": split.last,
        "context_parallel_size": parallel.cp,
        # MoE layers need it exactly if there is tensor parallelism
        "sequence_parallel": parallel.tp > 1,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": expert_tensor_size(parallel),
        "variable_seq_lengths": parallel.pp > 1,
        # With pp=2 both directions have the same peer, and a batched send in one direction could
        # be received as one of the other.
        "overlap_p2p_comm": chunks > 1,
        "batch_p2p_comm": chunks == 1,
    }


def fuses_rotary_embedding(latent: LatentAttention | None) -> bool:
    """Return whether Megatron has a fused rotary embedding for an attention.

    For latent attention it fuses the one with YaRN only, in Triton kernels whose ranges must be
    powers of two.

    latent: None for ordinary attention.
    """
    if latent is None:
        return True
    sizes = (latent.plain_dim, latent.rotary_dim, latent.value_dim)
    return latent.yarn is not None and all(size.bit_count() == 1 for size in sizes)


def _machine(shape: ModelShape, *, on_gpu: bool, uses_te: bool) -> dict[str, Any]:
    """Return the settings of kernels.

    With Transformer Engine all fused kernels are on through which routes can be replayed.

    moe_permute_fusion also fixes the order in which the experts of a token are added. Megatron's
    own unpermute is a scatter_add_ with bfloat16 atomics, so that two passes over the same weights
    differ by more than ESPO's clip range (tests/lab/gpu_stages/passes.py). Without the fusion
    `mcore/layers/deterministic_permute.py` fixes the order. torch's deterministic algorithms would
    too, but they slow down every index_add and scatter of the model.

    The fused router ignores replay and stays off.
    """
    has_apex_accumulation = find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "use_cpu_initialization": not on_gpu,
        "cuda_graph_modules": [],
        "moe_permute_fusion": uses_te,
        "moe_router_fusion": False,
        # The unfused rotary embedding also waits for the sequences' lengths in each layer.
        "apply_rope_fusion": uses_te and fuses_rotary_embedding(shape.latent),
        "bias_activation_fusion": uses_te,
        "bias_dropout_fusion": uses_te,
        "gradient_accumulation_fusion": uses_te and has_apex_accumulation,
        "masked_softmax_fusion": False,  # Transformer Engine's attention has its own softmax
        "persist_layer_norm": False,
    }
