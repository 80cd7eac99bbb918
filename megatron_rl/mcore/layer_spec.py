"""Which modules a decoder layer is made of: Megatron's own with ours (`local`), or Transformer
Engine's (`te`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.schema import ModelSettings
from megatron_rl.contracts.launch_facts import has_transformer_engine
from megatron_rl.mcore.cpu.modules import CpuCoreAttention, CpuRmsNorm
from megatron_rl.mcore.cpu.padded_gemm import ExpertColumnLinear, ExpertRowLinear

Spec = Literal["local", "te"]


def chosen_spec(model: ModelSettings) -> Spec:
    """model.spec, or what null stands for here: `te` where it is installed and has attention for
    the dtype.
    """
    if model.spec is not None:
        return model.spec
    usable = torch.cuda.is_available() and has_transformer_engine() and model.dtype != "float32"
    return "te" if usable else "local"


def spec_options(model: ModelSettings) -> dict[str, Any]:
    """What the choice of modules means for Megatron's configuration.

    Grouped products of experts are Transformer Engine's; Megatron's own need a library that nobody
    publishes wheels of. Every fusion that Apex or Transformer Engine brings stays off with `local`,
    and RMSNorm is ours there.
    """
    if chosen_spec(model) == "local":
        return {"moe_grouped_gemm": False}
    if model.fp8 is None:
        return {"moe_grouped_gemm": True}
    # one format in both passes wherever scales are per block; tensor-wide ones need e5m2's range in
    # the backward pass
    return {
        "moe_grouped_gemm": True,
        "fp8": "hybrid" if model.fp8 == "tensorwise" else "e4m3",
        "fp8_recipe": model.fp8,
    }


def decoder_spec(config: TransformerConfig, model: ModelSettings, vp_stage: int | None) -> Any:
    """The decoder block of this pipeline stage, as GPTModel takes it."""
    te = chosen_spec(model) == "te"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=vp_stage
    )
    return spec if te else _with_our_modules(spec)


def _with_our_modules(spec: Any) -> Any:
    """Swap attention and norms of a local spec for those that take packed sequences and any device."""
    for layer in spec.layer_specs:
        modules = layer.submodules
        attention = modules.self_attention.submodules
        if attention.core_attention is DotProductAttention:
            attention.core_attention = CpuCoreAttention
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if vars(attention).get(norm) is WrappedTorchNorm:
                setattr(attention, norm, CpuRmsNorm)
        modules.input_layernorm = modules.pre_mlp_layernorm = CpuRmsNorm
        if _has_experts(modules):
            experts = _submodules(_submodules(modules.mlp).experts)
            experts.linear_fc1, experts.linear_fc2 = ExpertColumnLinear, ExpertRowLinear
        modules.sharded_state_dict_keys_map = _names_in_checkpoints(modules)
    spec.layer_norm = CpuRmsNorm
    return spec


def _names_in_checkpoints(modules: Any) -> dict[str, str]:
    """What Transformer Engine calls a layer's norms, which it fuses into the products behind them.

    Megatron's own map for local specs names the norm before experts as if it were fused, which it
    is not.
    """
    latent = "kv_layernorm" in vars(modules.self_attention.submodules)
    fused = (
        {"self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_"}
        if latent
        else {}
    )
    fused |= (
        {"self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_"}
        if latent
        else {}
    )
    fused |= {} if latent else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return (
        fused
        if _has_experts(modules)
        else fused | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    )


def _has_experts(modules: Any) -> bool:
    """A `ModuleSpec` in Megatron-Core 0.16, a `functools.partial` since; of dense layers, of a
    class's method.
    """
    built = modules.mlp.func if isinstance(modules.mlp, partial) else modules.mlp.module
    return isinstance(built, type) and issubclass(built, MoELayer)


def _submodules(spec: Any) -> Any:
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
