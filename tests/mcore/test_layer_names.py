"""Names of parameters with both specs: both hold the same tensors of a checkpoint."""

from __future__ import annotations

from megatron_rl.mcore.weights.layout import layout_of
from megatron_rl.models.qwen3_moe import NAMES

_SHARED = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
)
# The names of megatron-core 0.16.1 for the parameters of a dense layer (0) and of a MoE layer (1)
# with two experts on each rank, by spec.
LOCAL = {
    0: (
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ),
    1: (
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *(
            f"mlp.experts.local_experts.{expert}.linear_fc{fc}.weight"
            for fc in (1, 2)
            for expert in (0, 1)
        ),
    ),
}
TE = {
    0: (
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ),
    1: (
        "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *(f"mlp.experts.linear_fc{fc}.weight{expert}" for fc in (1, 2) for expert in (0, 1)),
    ),
}
HF_LAYER = {
    0: ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    1: ("mlp.gate", *(f"mlp.experts.{e}.{x}_proj" for e in (2, 3) for x in ("gate", "up", "down"))),
}
HF_SHARED = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{x}_proj" for x in "qkvo"),
)


def hf_names(spec: dict[int, tuple[str, ...]]) -> list[str]:
    """Return the Hugging Face names of both layers on expert-parallel rank 1.

    Each rank has two experts.
    """
    names = [
        f"decoder.layers.{layer}.{inner}" for layer in spec for inner in (*_SHARED, *spec[layer])
    ]
    layouts = [layout_of(name, NAMES, layer_offset=5, expert_offset=2) for name in names]
    return sorted(hf_name for layout in layouts for hf_name in layout.hf_names)


def test_both_specs_hold_the_tensors_of_the_checkpoint() -> None:
    inner = {
        layer: (*HF_SHARED, "self_attn.q_norm", "self_attn.k_norm", *HF_LAYER[layer])
        for layer in HF_LAYER
    }
    checkpoint_names = sorted(
        f"model.layers.{layer + 5}.{name}.weight"
        for layer, names in inner.items()
        for name in names
    )
    assert hf_names(TE) == hf_names(LOCAL) == checkpoint_names


def test_both_specs_have_the_same_fusions_and_local_experts() -> None:
    """Only the order of a layer's tensors may differ between the specs."""
    for ours, theirs in (
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("mlp.experts.local_experts.1.linear_fc1.weight", "mlp.experts.linear_fc1.weight1"),
        ("mlp.experts.local_experts.1.linear_fc2.weight", "mlp.experts.linear_fc2.weight1"),
    ):
        layouts = [
            layout_of(f"decoder.layers.1.{name}", NAMES, layer_offset=5, expert_offset=2)
            for name in (ours, theirs)
        ]
        assert layouts[0] == layouts[1]
