"""The tensors that an FP8 engine holds in eight bits, and the configuration that says so to SGLang.

The matrices of attention, MLPs and experts are quantized, as in DeepSeek-V3's checkpoint (arXiv
2412.19437, section 3.3). Embeddings, the output layer, norms, routers and their biases are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.models.families import parameter_names
from megatron_rl.models.names import OUTER, Fusion
from megatron_rl.models.shape import ModelShape

BLOCK = 128
"""Side of the square of weights that share a scale."""

_WHOLE = (Fusion.REPLICATED, Fusion.VOCABULARY)
_EXPERTS = "mlp.experts."
_SHARED_EXPERTS = "mlp.shared_experts."
_DENSE_MLP = "mlp.linear_"
_ROUTER = "mlp.router.weight"
_PLAIN_QUERY = "self_attention.linear_q_proj."
_COMPRESSED_QUERY = ("self_attention.linear_q_down_proj.", "self_attention.linear_q_up_proj.")
_COMPRESSED_QUERY_NORM = "self_attention.q_layernorm."


@dataclass(frozen=True)
class Fp8Weights:
    """Every Hugging Face tensor of a model, by what an FP8 engine does with it.

    matrices: engines hold them in FP8 with a scale for each block.
    others: the tensors which keep the engine's dtype.
    """

    matrices: frozenset[str]
    others: frozenset[str]


def fp8_weights(
    shape: ModelShape, *, unquantized_first: int = 0, unquantized_last: int = 0
) -> Fp8Weights:
    """List the tensors of a model.

    unquantized_first, unquantized_last: the numbers of layers at either end that stay unquantized.
    """
    whole_layers = _unquantized_layers(shape, unquantized_first, unquantized_last)
    matrices: set[str] = set()
    others = set(_outer_names(shape))
    for layer in range(shape.num_layers):
        for name, fusion in _names_of_layer(shape, layer):
            is_kept = fusion in _WHOLE or layer in whole_layers
            (others if is_kept else matrices).add(name)
    return Fp8Weights(frozenset(matrices), frozenset(others))


def quantization_config(
    shape: ModelShape, *, unquantized_first: int = 0, unquantized_last: int = 0
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json for these weights, as SGLang reads it."""
    layers = _unquantized_layers(shape, unquantized_first, unquantized_last)
    routers = [f"model.layers.{layer}.{_router(shape)}" for layer in shape.moe_layers]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [
            "lm_head",
            *routers,
            *(f"model.layers.{layer}" for layer in sorted(layers)),
        ],
    }


def undivided_parts(shape: ModelShape, *, tp: int, ep: int) -> Iterator[tuple[str, int]]:
    """Yield the parts of a model that blocks do not divide on an engine's rank, with their sizes.

    SGLang joins q with k and v, and gate with up, and needs whole blocks in each. Its checksums
    need whole blocks along both sides of every matrix.

    tp, ep: the engine's tensor- and expert-parallel sizes.
    """
    parts = {"hidden_size": shape.hidden_size}
    if shape.latent is None:
        kv_shards = min(tp, shape.num_key_value_heads)  # ranks beyond that hold copies
        parts["heads x head_dim"] = shape.num_attention_heads * shape.head_dim // tp
        parts["key-value heads x head_dim"] = (
            shape.num_key_value_heads * shape.head_dim // kv_shards
        )
    if shape.moe_layers:
        parts["moe_intermediate_size"] = shape.moe_ffn_hidden_size // (tp // ep)
    if len(shape.moe_layers) < shape.num_layers:
        parts["intermediate_size"] = shape.ffn_hidden_size // tp
    for part, size in parts.items():
        if size % BLOCK:
            yield part, size


def _unquantized_layers(shape: ModelShape, first: int, last: int) -> frozenset[int]:
    end = shape.num_layers - last
    return frozenset(layer for layer in range(shape.num_layers) if layer < first or layer >= end)


def _outer_names(shape: ModelShape) -> Iterator[str]:
    for (name,), _ in OUTER.values():
        if name != "lm_head.weight" or not shape.tie_word_embeddings:
            yield name


def _names_of_layer(shape: ModelShape, layer: int) -> Iterator[tuple[str, Fusion]]:
    """Yield the tensors of a layer. A norm may come twice."""
    for parameter, (templates, fusion) in parameter_names(shape).items():
        if not _has_parameter(shape, layer, parameter):
            continue
        experts = range(shape.num_experts) if parameter.startswith(_EXPERTS) else (0,)
        for expert in experts:
            for template in templates:
                inner = template.replace("{expert}", str(expert))
                yield f"model.layers.{layer}.{inner}", fusion


def _has_parameter(shape: ModelShape, layer: int, parameter: str) -> bool:
    """Return whether a layer has a parameter of its family, by Megatron's name."""
    has_experts = layer in shape.moe_layers
    if parameter.startswith((_EXPERTS, "mlp.router.")):
        return has_experts
    if parameter.startswith(_SHARED_EXPERTS):
        return has_experts and shape.shared_ffn_hidden_size > 0
    if parameter.startswith(_DENSE_MLP) and not parameter.endswith("layer_norm_weight"):
        return not has_experts
    if shape.latent is not None:
        is_compressed = shape.latent.q_rank is not None
        if parameter.startswith(_PLAIN_QUERY):
            return not is_compressed
        if parameter.startswith((*_COMPRESSED_QUERY, _COMPRESSED_QUERY_NORM)):
            return is_compressed
    return True


def _router(shape: ModelShape) -> str:
    """Return the name of a router in its layer. The model has experts."""
    (name,), _ = parameter_names(shape)[_ROUTER]
    return name.removesuffix(".weight")
