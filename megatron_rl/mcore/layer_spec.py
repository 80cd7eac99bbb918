"""Chooses the modules of a decoder layer.

`local` combines Megatron's own modules with modules of `mcore/layers`. `te` uses Transformer
Engine's modules.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.schema import ModelSettings
from megatron_rl.contracts.launch_facts import has_transformer_engine
from megatron_rl.mcore.gpu_libraries import require_transformer_engine
from megatron_rl.mcore.layers.attention import PackedAttention
from megatron_rl.mcore.layers.padded_gemm import ExpertColumnLinear, ExpertRowLinear
from megatron_rl.mcore.layers.rms_norm import RmsNorm
from megatron_rl.mcore.seams import WholeQueryAttention

Spec = Literal["local", "te"]


def resolve_spec(model: ModelSettings) -> Spec:
    """Return model.spec, with null resolved for this machine.

    Null is `te` with CUDA, Transformer Engine and another dtype than float32, for which
    Transformer Engine has no attention. Otherwise it is `local`.

    Raises `ConfigurationRefused` if that Transformer Engine does not run on this GPU.
    """
    require_transformer_engine(model)
    if model.spec is not None:
        return model.spec
    supports_te = (
        torch.cuda.is_available() and has_transformer_engine() and model.dtype != "float32"
    )
    return "te" if supports_te else "local"


def spec_options(model: ModelSettings) -> dict[str, Any]:
    """Return the arguments of Megatron's configuration that depend on the spec.

    Grouped products of experts need Transformer Engine, because Megatron's own need a library
    without published wheels. With `local`, every fusion of Apex or Transformer Engine is off, and
    RMSNorm is `mcore/layers/rms_norm.py`.
    """
    if resolve_spec(model) == "local":
        return {"moe_grouped_gemm": False}
    if model.fp8 is None:
        return {"moe_grouped_gemm": True}
    # Block-wise scales allow e4m3 in both passes. Tensor-wise scales need the range of e5m2 in the
    # backward pass.
    return {
        "moe_grouped_gemm": True,
        "fp8": "hybrid" if model.fp8 == "tensorwise" else "e4m3",
        "fp8_recipe": model.fp8,
    }


def decoder_spec(config: TransformerConfig, model: ModelSettings, vp_stage: int | None) -> Any:
    """Return the spec of the decoder block of a pipeline stage, as GPTModel takes it.

    vp_stage: the virtual pipeline stage; None without virtual stages.
    """
    uses_te = resolve_spec(model) == "te"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=uses_te, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        if getattr(config, "q_lora_rank", 0) is None:
            layer.submodules.self_attention.module = WholeQueryAttention
    if not uses_te:
        _replace_modules(spec)
    return spec


def _replace_modules(spec: Any) -> None:
    """Replace attention, norms and experts of a local spec by the modules of `mcore/layers`."""
    for layer in spec.layer_specs:
        modules = layer.submodules
        _replace_attention(modules.self_attention.submodules)
        modules.input_layernorm = modules.pre_mlp_layernorm = RmsNorm
        if _has_experts(modules):
            experts = modules.mlp.keywords["submodules"].experts.keywords["submodules"]
            experts.linear_fc1 = ExpertColumnLinear
            experts.linear_fc2 = ExpertRowLinear
        modules.sharded_state_dict_keys_map = _checkpoint_names(modules)
    spec.layer_norm = RmsNorm


def _replace_attention(attention: Any) -> None:
    if attention.core_attention is DotProductAttention:
        attention.core_attention = PackedAttention
    for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if vars(attention).get(norm) is WrappedTorchNorm:
            setattr(attention, norm, RmsNorm)


def _checkpoint_names(modules: Any) -> dict[str, str]:
    """Map the prefixes of a layer's norms to their names in Transformer Engine's checkpoints.

    Transformer Engine fuses a norm into the linear layer behind it. Megatron's own map for local
    specs names the norm before experts as if it were fused, but that norm is not.
    """
    names = {}
    if "kv_layernorm" in vars(modules.self_attention.submodules):  # multi-head latent attention
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not _has_experts(modules):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _has_experts(modules: Any) -> bool:
    """True for a layer with experts.

    The MLP is a `functools.partial`, of a class with experts or of a method in dense layers.
    """
    mlp = modules.mlp.func
    return isinstance(mlp, type) and issubclass(mlp, MoELayer)
