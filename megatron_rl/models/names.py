"""Names of Megatron's parameters in a Hugging Face checkpoint, as building blocks for families.

Keys are Megatron's names inside a decoder layer, without the number of an expert. Values are the
names of one or more Hugging Face tensors inside `model.layers.N`, with `{expert}` for the number,
and how these tensors are fused into the parameter. Transformer Engine fuses a norm into the linear
layer after it, so a norm has two Megatron names.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Fusion(enum.Enum):
    """Fusion of Hugging Face tensors into one parameter, and its split by tensor parallelism."""

    REPLICATED = "replicated"
    # A row for each token, split along axis 0. Rows are added until the number divides.
    VOCABULARY = "vocabulary"
    ROWS = "rows"  # column-parallel weights, split along axis 0
    COLUMNS = "columns"  # row-parallel weights, split along axis 1
    QKV = "qkv"  # q, k and v interleaved by query group, split by group along axis 0
    GATED = "gated"  # gate above up. Every shard holds a part of both


Names = Mapping[str, tuple[tuple[str, ...], Fusion]]

OUTER: Names = {
    "embedding.word_embeddings.weight": (("model.embed_tokens.weight",), Fusion.VOCABULARY),
    "decoder.final_layernorm.weight": (("model.norm.weight",), Fusion.REPLICATED),
    "output_layer.weight": (("lm_head.weight",), Fusion.VOCABULARY),
}
LAYER_NORMS: Names = {
    "input_layernorm.weight": (("input_layernorm.weight",), Fusion.REPLICATED),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), Fusion.REPLICATED),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Fusion.REPLICATED),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), Fusion.REPLICATED),
}
OUTPUT: Names = {
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), Fusion.COLUMNS)
}
ATTENTION: Names = {
    "self_attention.linear_qkv.weight": (
        tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
        Fusion.QKV,
    ),
    **OUTPUT,
}
QK_NORMS: Names = {
    f"self_attention.{x}_layernorm.weight": ((f"self_attn.{x}_norm.weight",), Fusion.REPLICATED)
    for x in "qk"
}


def mlp(
    location: str,
    prefix: str,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> Names:
    """Return the names of a gated MLP.

    location, prefix: prefixes in Megatron and in the checkpoint, both with the final dot.
    """
    return {
        f"{location}linear_fc1.weight": (
            (f"{prefix}{gate}.weight", f"{prefix}{up}.weight"),
            Fusion.GATED,
        ),
        f"{location}linear_fc2.weight": ((f"{prefix}{down}.weight",), Fusion.COLUMNS),
    }


def router(name: str) -> Names:
    """Return the name of the router's weight. name: in the checkpoint."""
    return {"mlp.router.weight": ((name,), Fusion.REPLICATED)}


DENSE_MLP = mlp("mlp.", "mlp.")
EXPERTS = mlp("mlp.experts.", "mlp.experts.{expert}.")
