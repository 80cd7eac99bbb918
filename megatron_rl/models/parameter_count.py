"""How many parameters a model has, part by part."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.models.shape import ModelShape


class Count(NamedTuple):
    """Parameters.

    split: those that tensor-parallel ranks share; whole: those that each of them holds.
    """

    split: int
    whole: int


def attention(shape: ModelShape) -> Count:
    """Of one layer, its input norm included."""
    hidden, heads, dim = shape.hidden_size, shape.num_attention_heads, shape.head_dim
    latent = shape.latent
    if latent is None:
        norms = 2 * dim if shape.qk_norm else 0
        return Count(hidden * dim * 2 * (heads + shape.num_key_value_heads), norms + hidden)
    query = heads * dim
    queries = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
    keys = hidden * (latent.kv_rank + latent.rotary_dim)
    values = latent.kv_rank * heads * (latent.plain_dim + latent.value_dim)
    return Count(
        queries + keys + values + heads * latent.value_dim * hidden,
        (latent.q_rank or 0) + latent.kv_rank + hidden,
    )


def dense_mlp(shape: ModelShape) -> Count:
    """Of one layer without experts, the norm before it included."""
    return Count(3 * shape.hidden_size * shape.ffn_hidden_size, shape.hidden_size)


def beside_experts(shape: ModelShape) -> Count:
    """Of one layer with experts: norm, router and the expert that every token passes. Its bias is
    no parameter.
    """
    shared = 3 * shape.hidden_size * shape.shared_ffn_hidden_size
    return Count(shared, shape.hidden_size + shape.num_experts * shape.hidden_size)


def one_expert(shape: ModelShape) -> int:
    """Of one routed expert; ranks that share an expert share all of it."""
    return 3 * shape.hidden_size * shape.moe_ffn_hidden_size


def num_parameters(shape: ModelShape) -> int:
    """All parameters of a model."""
    moe, dense = len(shape.moe_layers), shape.num_layers - len(shape.moe_layers)
    layers = shape.num_layers * sum(attention(shape)) + dense * sum(dense_mlp(shape))
    layers += moe * (sum(beside_experts(shape)) + shape.num_experts * one_expert(shape))
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return layers + tables + shape.hidden_size
