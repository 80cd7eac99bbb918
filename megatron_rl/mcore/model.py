"""Builds Megatron's GPTModel from a model's shape."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore.layer_spec import decoder_spec
from megatron_rl.mcore.layers.packed_rotary import PackedRotaryEmbedding
from megatron_rl.mcore.seams import keep_expert_bias
from megatron_rl.mcore.transformer_config import transformer_config
from megatron_rl.models.shape import ModelShape

# FP8 matrix products take multiples of these rows. mxfp8 has one scale for 32 rows, blockwise one
# for 128 rows.
_FP8_ROWS = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}


def pack_multiple(model: ModelSettings) -> int:
    """Return the multiple to which each rank pads the rows of a packed batch; 1 without FP8."""
    return 1 if model.fp8 is None else _FP8_ROWS[model.fp8]


def build_models(
    shape: ModelShape,
    model: ModelSettings,
    parallel: ParallelSettings,
    *,
    on_gpu: bool | None = None,
) -> list[torch.nn.Module]:
    """Build the model chunks of this rank with random weights, one per virtual pipeline stage.

    on_gpu: place the chunks on the GPU; None means if there is one.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    config = transformer_config(shape, model, parallel, on_gpu=on_gpu)
    chunks = parallel.vpp or 1
    stages: list[int | None] = [*range(chunks)] if chunks > 1 else [None]
    return [_build_chunk(config, shape, model, stage, on_gpu=on_gpu) for stage in stages]


def _build_chunk(
    config: TransformerConfig,
    shape: ModelShape,
    model: ModelSettings,
    vp_stage: int | None,
    *,
    on_gpu: bool,
) -> torch.nn.Module:
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, model, vp_stage),
        vocab_size=shape.vocab_size + -shape.vocab_size % config.tensor_model_parallel_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        vp_stage=vp_stage,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    # On a GPU, Megatron would wait for each sequence's bounds in each layer
    if not on_gpu and not config.multi_latent_attention:
        chunk.rotary_pos_emb = PackedRotaryEmbedding(
            kv_channels=config.kv_channels,
            rotary_percent=1.0,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=int(shape.rope_theta),
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=chunk.pg_collection.cp,
        )
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(_release_probabilities)
    if on_gpu:
        chunk = chunk.cuda()
    return _to_bfloat16(config, chunk) if config.bf16 else chunk


def _release_probabilities(layer: MoELayer, _inputs: object, _output: object) -> None:
    """Let the dispatcher forget the routing probabilities of a finished pass.

    With recomputation their graph would keep the input of the layer and its gradient until the
    layer's next pass.
    """
    layer.token_dispatcher.probs = None


def _to_bfloat16(config: TransformerConfig, chunk: torch.nn.Module) -> torch.nn.Module:
    """Convert a chunk to bfloat16, except the expert biases of its routers.

    A rounded bias would choose other experts.
    """
    bfloat16_chunk = Float16Module(config, chunk)
    for router in bfloat16_chunk.modules():
        if isinstance(router, TopKRouter):
            keep_expert_bias(router)
    return bfloat16_chunk
