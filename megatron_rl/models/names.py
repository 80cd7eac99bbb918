"""What Megatron's parameters are called in a Hugging Face checkpoint, and how several become one;
parts for families.

A family's names are keyed by the name inside a decoder layer, `experts.*` without the expert's
number; Hugging Face's are those inside `model.layers.N`, with `{expert}` for the number. Local
names and Transformer Engine's, which fuses a norm into the linear layer behind it, stand side by
side.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Fusion(enum.Enum):
    """How Hugging Face tensors are fused into one parameter, and along which axis tensor
    parallelism cuts it.
    """

    REPLICATED = "replicated"
    VOCABULARY = (
        "vocabulary"  # a row for each token: cut along axis 0, with rows added until it divides
    )
    ROWS = "rows"  # column-parallel weights: cut along axis 0
    COLUMNS = "columns"  # row-parallel weights: cut along axis 1
    QKV = "qkv"  # q, k, v interleaved by query group: cut by group along axis 0
    GATED = "gated"  # gate over up; every shard holds its part of both


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
    at: str, prefix: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Names:
    """A gated MLP: `at` in Megatron, `prefix` in the checkpoint, both with their last point."""
    return {
        f"{at}linear_fc1.weight": (
            (f"{prefix}{gate}.weight", f"{prefix}{up}.weight"),
            Fusion.GATED,
        ),
        f"{at}linear_fc2.weight": ((f"{prefix}{down}.weight",), Fusion.COLUMNS),
    }


def router(name: str) -> Names:
    return {"mlp.router.weight": ((name,), Fusion.REPLICATED)}


DENSE_MLP = mlp("mlp.", "mlp.")
EXPERTS = mlp("mlp.experts.", "mlp.experts.{expert}.")
