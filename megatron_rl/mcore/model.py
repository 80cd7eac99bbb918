"""Builds Megatron's GPTModel from a Hugging Face shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.mcore.cpu.modules import CpuCoreAttention, CpuRmsNorm
from megatron_rl.models.qwen3_moe import ModelShape


@dataclass(frozen=True)
class ParallelSizes:
    """Megatron's parallel sizes; vpp is the number of virtual pipeline chunks a stage holds."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class FromScratch:
    """What only a model without pretrained weights needs. embedding_std None: initializer_range, as all weights."""

    embedding_std: float | None = None
    hidden_dropout: float = 0.0


def transformer_config(
    model: ModelShape, sizes: ParallelSizes, *, dtype: torch.dtype, recompute: str, scratch: FromScratch
) -> TransformerConfig:
    """Megatron's configuration of the model. recompute: none, selective or full."""
    on_gpu = torch.cuda.is_available()
    full = recompute == "full"
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        num_moe_experts=model.num_experts,
        moe_layer_freq=[int(i in model.moe_layers) for i in range(model.num_layers)],
        moe_router_topk=model.topk,
        moe_router_pre_softmax=not model.norm_topk_prob,
        moe_router_score_function="softmax",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=on_gpu,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=scratch.hidden_dropout,
        init_method_std=model.initializer_range,
        embedding_init_method_std=scratch.embedding_std,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        variable_seq_lengths=sizes.pp > 1,
        # batched sends of both directions share a peer when pp is 2, and would be received by the wrong one
        overlap_p2p_comm=sizes.vpp > 1,
        batch_p2p_comm=sizes.vpp == 1,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        moe_permute_fusion=False,
        use_cpu_initialization=not on_gpu,
        **_parallel_sizes(sizes),
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        cuda_graph_scope=[],
    )


def _parallel_sizes(sizes: ParallelSizes) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "context_parallel_size": sizes.cp,
        "sequence_parallel": sizes.sequence_parallel,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
    }


def build_models(
    model: ModelShape,
    sizes: ParallelSizes,
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    scratch: FromScratch = FromScratch(),
) -> list[torch.nn.Module]:
    """This rank's model chunks, one per virtual pipeline stage, with random weights."""
    config = transformer_config(model, sizes, dtype=dtype, recompute=recompute, scratch=scratch)
    return [_build_chunk(config, model, chunk if sizes.vpp > 1 else None) for chunk in range(sizes.vpp)]


def _build_chunk(config: TransformerConfig, model: ModelShape, vp_stage: int | None) -> torch.nn.Module:
    on_gpu = torch.cuda.is_available()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=on_gpu, normalization="RMSNorm", vp_stage=vp_stage)
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec if on_gpu else _on_cpu(spec),
        vocab_size=padded_vocab_size(model.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        vp_stage=vp_stage,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    if on_gpu:
        chunk = chunk.cuda()
    return Float16Module(config, chunk) if config.bf16 else chunk


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary padded to a multiple of the tensor-parallel size."""
    return vocab_size + -vocab_size % tp


def _on_cpu(spec: Any) -> Any:
    """Swap the local modules of a decoder block spec for the CPU ones."""
    for layer in spec.layer_specs:
        modules = layer.submodules
        attention = modules.self_attention.submodules
        if attention.core_attention is DotProductAttention:
            attention.core_attention = CpuCoreAttention
        if attention.q_layernorm is WrappedTorchNorm:
            attention.q_layernorm = attention.k_layernorm = CpuRmsNorm
        modules.input_layernorm = modules.pre_mlp_layernorm = CpuRmsNorm
    spec.layer_norm = CpuRmsNorm
    return spec
