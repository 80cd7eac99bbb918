"""Expected digests of an engine's parameters."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import Slot, locate_slot, padding_rows

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", Slot(f"{LAYER}.self_attn.qkv_proj.weight", 0, 3)),
        (f"{LAYER}.self_attn.v_proj.bias", Slot(f"{LAYER}.self_attn.qkv_proj.bias", 2, 3)),
        (f"{LAYER}.mlp.up_proj.weight", Slot(f"{LAYER}.mlp.gate_up_proj.weight", 1, 2)),
        (
            f"{LAYER}.mlp.experts.2.gate_proj.weight",
            Slot(f"{LAYER}.mlp.experts.w13_weight", 4, 16, True),
        ),
        (
            f"{LAYER}.mlp.experts.2.up_proj.weight",
            Slot(f"{LAYER}.mlp.experts.w13_weight", 5, 16, True),
        ),
        (
            f"{LAYER}.mlp.experts.7.down_proj.weight",
            Slot(f"{LAYER}.mlp.experts.w2_weight", 7, 8, True),
        ),
        (
            f"{LAYER}.mlp.shared_experts.up_proj.weight",
            Slot(f"{LAYER}.mlp.shared_experts.gate_up_proj.weight", 1, 2),
        ),
        (
            f"{LAYER}.block_sparse_moe.experts.2.w1.weight",
            Slot(f"{LAYER}.block_sparse_moe.experts.w13_weight", 4, 16, True),
        ),
        (
            f"{LAYER}.block_sparse_moe.experts.2.w3.weight",
            Slot(f"{LAYER}.block_sparse_moe.experts.w13_weight", 5, 16, True),
        ),
        (
            f"{LAYER}.block_sparse_moe.experts.7.w2.weight",
            Slot(f"{LAYER}.block_sparse_moe.experts.w2_weight", 7, 8, True),
        ),
        (f"{LAYER}.mlp.gate.weight", Slot(f"{LAYER}.mlp.gate.weight", 0, 1)),
        (f"{LAYER}.self_attn.q_norm.weight", Slot(f"{LAYER}.self_attn.q_norm.weight", 0, 1)),
        ("lm_head.weight", Slot("lm_head.weight", 0, 1)),
    ],
)
def test_slots_of_checkpoint_tensors(name: str, slot: Slot) -> None:
    assert locate_slot(name, num_experts=8) == slot


def test_expert_outside_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="experts 0 to 7"):
        locate_slot(f"{LAYER}.mlp.experts.8.up_proj.weight", num_experts=8)


def test_only_the_vocabulary_is_padded() -> None:
    assert padding_rows("lm_head.weight", 200) == 56
    assert padding_rows("model.embed_tokens.weight", 192) == 0
    assert padding_rows("model.norm.weight", 200) == 0


def test_vocabulary_is_padded_until_the_ranks_can_share_it() -> None:
    assert padding_rows("lm_head.weight", 200, tp=4) == 56
    assert padding_rows("lm_head.weight", 130, tp=3) == 62
    assert padding_rows("lm_head.weight", 200, tp=3) == 184


def sha(*tensors: torch.Tensor) -> str:
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()[:16]


@given(st.permutations(range(6)))
def test_fused_digests_do_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    parts = {
        f"{LAYER}.mlp.experts.{expert}.{kind}_proj.weight": torch.full(
            (2, 3), float(2 * expert + (kind == "up"))
        )
        for expert in range(3)
        for kind in ("gate", "up")
    }
    expectation = WeightExpectation(dtype=torch.float32, num_experts=3)
    names = list(parts)
    for index in order:
        expectation.add(names[index], parts[names[index]])
    assert expectation.checksums() == {f"{LAYER}.mlp.experts.w13_weight": sha(*parts.values())}
    assert expectation.tensors_of(f"{LAYER}.mlp.experts.w13_weight") == tuple(names)


def test_names_alone_hold_no_tensors() -> None:
    """Experts arrive in turn from the expert-parallel ranks, and most of them come early."""

    def held_bytes(*, compares_values: bool) -> list[int]:
        expectation = WeightExpectation(
            dtype=torch.float32, num_experts=4, compares_values=compares_values
        )
        sizes = []
        for expert in (0, 2, 1, 3):
            expectation.add(f"{LAYER}.mlp.experts.{expert}.down_proj.weight", torch.ones(2, 3))
            sizes.append(expectation.held_bytes)
        assert [*expectation.checksums()] == [f"{LAYER}.mlp.experts.w2_weight"]
        return sizes

    assert held_bytes(compares_values=True) == [0, 24, 0, 0]
    assert held_bytes(compares_values=False) == [0, 0, 0, 0]


def test_digest_covers_the_engine_dtype_and_vocabulary_padding() -> None:
    weight = torch.randn(63, 4)
    expectation = WeightExpectation(dtype=torch.bfloat16, num_experts=1)
    expectation.add("lm_head.weight", weight)
    assert expectation.checksums() == {
        "lm_head.weight": sha(weight.to(torch.bfloat16), torch.zeros(1, 4, dtype=torch.bfloat16))
    }


def test_router_bias_stays_in_float32() -> None:
    bias = torch.randn(8)
    expectation = WeightExpectation(dtype=torch.bfloat16, num_experts=8)
    expectation.add(f"{LAYER}.mlp.gate.e_score_correction_bias", bias)
    assert expectation.checksums() == {f"{LAYER}.mlp.gate.e_score_correction_bias": sha(bias)}


def test_observe_passes_the_stream_on_lazily() -> None:
    expectation = WeightExpectation(dtype=torch.float32, num_experts=1)
    tensor = torch.ones(2)
    stream = expectation.observe(iter([("a", tensor), ("b", tensor)]))
    name, same = next(stream)
    assert (name, same is tensor) == ("a", True)
    assert expectation.checksums().keys() == {"a"}


def test_one_bit_changes_the_digest() -> None:
    first, second = (WeightExpectation(dtype=torch.float32, num_experts=1) for _ in range(2))
    tensor = torch.randn(100)
    first.add("a", tensor)
    tensor.view(torch.int32)[57] ^= 1
    second.add("a", tensor)
    assert first.checksums() != second.checksums()


def test_incomplete_and_repeated_tensors_are_refused() -> None:
    expectation = WeightExpectation(dtype=torch.float32, num_experts=1)
    expectation.add(f"{LAYER}.self_attn.k_proj.weight", torch.ones(1))
    with pytest.raises(ValueError, match=r"qkv_proj\.weight has 1 of 3 tensors"):
        expectation.checksums()
    with pytest.raises(ValueError, match="already holds"):
        expectation.add(f"{LAYER}.self_attn.k_proj.weight", torch.ones(1))
