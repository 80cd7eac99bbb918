"""Number of parameters of a model, part by part."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.models.shape import ModelShape


class ParameterCount(NamedTuple):
    """Numbers of parameters.

    split: parameters that tensor parallelism splits.
    whole: parameters that every tensor-parallel rank holds.
    """

    split: int
    whole: int


def attention_parameters(shape: ModelShape) -> ParameterCount:
    """Count the attention of one layer, including its input norm."""
    hidden_size = shape.hidden_size
    heads = shape.num_attention_heads
    dim = shape.head_dim
    latent = shape.latent
    if latent is None:
        norms = 2 * dim if shape.qk_norm else 0
        return ParameterCount(
            hidden_size * dim * 2 * (heads + shape.num_key_value_heads), norms + hidden_size
        )
    query = heads * dim
    if latent.q_rank is None:
        queries = hidden_size * query
    else:
        queries = latent.q_rank * (hidden_size + query)
    keys = hidden_size * (latent.kv_rank + latent.rotary_dim)
    values = latent.kv_rank * heads * (latent.plain_dim + latent.value_dim)
    output = heads * latent.value_dim * hidden_size
    norms = (latent.q_rank or 0) + latent.kv_rank
    return ParameterCount(queries + keys + values + output, norms + hidden_size)


def dense_mlp_parameters(shape: ModelShape) -> ParameterCount:
    """Count the MLP of one layer without experts, including its norm."""
    return ParameterCount(3 * shape.hidden_size * shape.ffn_hidden_size, shape.hidden_size)


def shared_moe_parameters(shape: ModelShape) -> ParameterCount:
    """Count the norm, router and shared expert of one layer with experts.

    The router's bias is not counted, because it is no parameter.
    """
    shared_expert = 3 * shape.hidden_size * shape.shared_ffn_hidden_size
    router = shape.num_experts * shape.hidden_size
    return ParameterCount(shared_expert, shape.hidden_size + router)


def expert_parameters(shape: ModelShape) -> int:
    """Count one routed expert. Tensor parallelism does not split it."""
    return 3 * shape.hidden_size * shape.moe_ffn_hidden_size


def num_parameters(shape: ModelShape) -> int:
    """Count all parameters of a model."""
    moe_layers = len(shape.moe_layers)
    dense_layers = shape.num_layers - moe_layers
    experts = shape.num_experts * expert_parameters(shape)
    layers = shape.num_layers * sum(attention_parameters(shape))
    layers += dense_layers * sum(dense_mlp_parameters(shape))
    layers += moe_layers * (sum(shared_moe_parameters(shape)) + experts)
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return layers + embeddings + shape.hidden_size
