"""Stand-ins for Transformer Engine's compiled functions equal torch's own operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.te_rehearsal.compiled import (
    attention,
    matrix_products,
    norms,
    optimizer_steps,
    quantizers,
)

BOUNDS = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
ROWS = 16  # two more than the sequences have
HEADS = 4
GROUPS = 2
KEY_DIM = 8
VALUE_DIM = 6
SCALE = 0.3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def enum(name: str) -> Any:
    return SimpleNamespace(name=name)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def expected_attention(query: Any, key: Any, value: Any) -> torch.Tensor:
    """Causal attention of each sequence by torch."""
    parts = []
    for start, stop in ((0, 5), (5, 6), (6, 14)):
        heads = [t[start:stop].transpose(0, 1)[None] for t in (query, key, value)]
        output = F.scaled_dot_product_attention(
            *heads, is_causal=True, scale=SCALE, enable_gqa=True
        )
        parts.append(output[0].transpose(0, 1))
    return torch.cat([*parts, query.new_zeros(ROWS - 14, HEADS, VALUE_DIM)])


LAYOUT = enum("NVTE_THD_THD_THD")
FORMAT = enum("NVTE_THD")
NO_FORMAT = enum("NVTE_QKV_Format_NOT_SET")
KINDS = (enum("NVTE_NO_BIAS"), enum("NVTE_PADDING_CAUSAL_MASK"), enum("NVTE_VANILLA_SOFTMAX"))


def run_attention(query: Any, key: Any, value: Any, *, max_seqlen: int = 8) -> list[torch.Tensor]:
    return attention.fused_attn_fwd(
        max_seqlen,
        max_seqlen,
        True,
        SCALE,
        0.0,
        True,
        LAYOUT,
        FORMAT,
        NO_FORMAT,
        *KINDS,
        (-1, 0),
        False,
        BOUNDS,
        BOUNDS,
        query,
        key,
        value,
        query.dtype,
        BOUNDS,
        BOUNDS,
    )


def qkv(dtype: torch.dtype) -> list[torch.Tensor]:
    sizes = ((HEADS, KEY_DIM), (GROUPS, KEY_DIM), (GROUPS, VALUE_DIM))
    return [random(ROWS, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]


@DTYPES
def test_fused_attention_equals_torch_attention_in_both_passes(dtype: torch.dtype) -> None:
    inputs = [tensor.requires_grad_() for tensor in qkv(dtype)]
    reference = expected_attention(*inputs)
    output, *context = run_attention(*(tensor.detach() for tensor in inputs))
    torch.testing.assert_close(output, reference, **tolerance(dtype))
    assert not output[14:].any()
    upstream = random(ROWS, HEADS, VALUE_DIM, dtype=dtype, seed=9)
    gradients = attention.fused_attn_bwd(
        8,
        8,
        SCALE,
        0.0,
        True,
        LAYOUT,
        FORMAT,
        FORMAT,
        LAYOUT,
        NO_FORMAT,
        NO_FORMAT,
        *KINDS,
        (-1, 0),
        False,
        False,
        BOUNDS,
        BOUNDS,
        *(tensor.detach() for tensor in inputs),
        output,
        upstream,
        dtype,
        context,
    )
    for gradient, torch_gradient in zip(
        gradients, torch.autograd.grad(reference, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(gradient, torch_gradient, **tolerance(dtype))


def test_fused_attention_refuses_a_sequence_longer_than_the_caller_says() -> None:
    with pytest.raises(ValueError, match="a sequence of 8 rows, but max_seqlen is 7"):
        run_attention(*qkv(torch.float32), max_seqlen=7)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "capability", "dtype", "is_fused"),
    [
        (128, 128, (9, 0), "kBFloat16", True),
        (192, 128, (9, 0), "kBFloat16", True),
        (192, 128, (10, 0), "kBFloat16", True),
        (256, 256, (9, 0), "kBFloat16", True),
        (256, 256, (10, 0), "kBFloat16", False),
        (192, 96, (9, 0), "kBFloat16", False),
        (20, 10, (9, 0), "kBFloat16", False),
        (128, 128, (8, 0), "kBFloat16", False),
        (128, 128, (9, 0), "kFloat32", False),
    ],
)
def test_fused_attention_is_chosen_for_head_sizes_of_cudnn(
    key_dim: int, value_dim: int, capability: tuple[int, int], dtype: str, is_fused: bool
) -> None:
    names = {"NVTE_F16_arbitrary_seqlen": True, "NVTE_No_Backend": False}
    extension = SimpleNamespace(NVTE_Fused_Attn_Backend=SimpleNamespace(**names))
    choose = attention.backend_of(extension, lambda: capability)
    kind = enum(dtype)
    sizes = (HEADS, GROUPS, 8, 8, key_dim, value_dim)
    flags = (False, False, False)
    assert choose(True, kind, kind, LAYOUT, *KINDS, 0.0, *sizes, -1, 0, *flags) is is_fused


def test_packed_rows_survive_padding_and_packing() -> None:
    rows = random(14, HEADS, KEY_DIM)
    batches = attention.convert_thd_to_bshd(rows, BOUNDS, 3, 8)
    assert batches.shape == (3, 8, HEADS, KEY_DIM)
    assert torch.equal(attention.convert_bshd_to_thd(batches, BOUNDS, 14), rows)


@DTYPES
def test_rms_norm_equals_torch_in_both_passes(dtype: torch.dtype) -> None:
    x = random(6, 16, dtype=dtype).requires_grad_()
    weight = (random(16, dtype=dtype, seed=1) + 1).requires_grad_()
    reference = F.rms_norm(x.float(), (16,), weight.float(), 1e-6).to(dtype)
    kind = enum("kFloat32" if dtype is torch.float32 else "kBFloat16")
    inputs = (x.detach(), weight.detach())
    output, _, scale = norms.rmsnorm_fwd(*inputs, 1e-6, None, None, kind, 0, False)
    torch.testing.assert_close(output, reference, **tolerance(dtype))
    upstream = random(6, 16, dtype=dtype, seed=2)
    gradients = norms.rmsnorm_bwd(upstream, inputs[0], scale, inputs[1], 0, False)
    for gradient, torch_gradient in zip(
        gradients, torch.autograd.grad(reference, (x, weight), upstream), strict=True
    ):
        torch.testing.assert_close(gradient, torch_gradient, **tolerance(dtype))


def test_rotary_embedding_starts_anew_in_each_sequence_and_turns_back() -> None:
    x = random(14, HEADS, KEY_DIM)
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1])).repeat(1, 2)[:, None, None]
    options = (None, enum("NVTE_THD"), False, BOUNDS, 1, 0)
    output = norms.fused_rope_forward(x, angles, *options)
    for start, stop in ((0, 5), (5, 6), (6, 14)):
        assert torch.equal(output[start], x[start])  # position 0 has angle 0
        pair = torch.complex(x[start:stop, :, 0], x[start:stop, :, 2])
        rotation = pair * torch.exp(1j * torch.arange(stop - start))[:, None]
        torch.testing.assert_close(output[start:stop, :, 0], rotation.real)
        torch.testing.assert_close(output[start:stop, :, 2], rotation.imag)
    assert torch.equal(output[..., 4:], x[..., 4:])
    torch.testing.assert_close(norms.fused_rope_backward(output, angles, *options), x)


def gemm(left: Any, right: Any, layout: str, out: Any = None, *, accumulate: bool = False) -> Any:
    options = (None, None, None, enum("kBFloat16"), False, None, False, torch.empty(0), 0)
    transposes = (layout[0] == "T", layout[1] == "T")
    return matrix_products.generic_gemm(
        left, transposes[0], right, transposes[1], out, *options, accumulate, False, beta=None
    )[0]


def test_matrix_products_of_a_linear_layer_in_both_passes() -> None:
    x = random(3, 5, 8).requires_grad_()
    weight = random(6, 8, seed=1).requires_grad_()
    reference = F.linear(x, weight)
    upstream = random(3, 5, 6, seed=2)
    x_gradient, weight_gradient = torch.autograd.grad(reference, (x, weight), upstream)
    inputs = (x.detach(), weight.detach())
    torch.testing.assert_close(gemm(inputs[1], inputs[0], "TN"), reference)
    torch.testing.assert_close(gemm(inputs[1], upstream, "NN"), x_gradient)
    torch.testing.assert_close(gemm(inputs[0], upstream, "NT"), weight_gradient)
    total = torch.ones_like(weight_gradient)
    gemm(inputs[0], upstream, "NT", total, accumulate=True)
    torch.testing.assert_close(total, weight_gradient + 1)


def test_grouped_products_take_their_own_rows() -> None:
    rows = random(7, 8)
    weights = [random(6, 8, seed=i) for i in (1, 2, 3)]
    output = torch.empty(7, 6)
    sizes = [2, 0, 5]
    empty = [torch.empty(0)] * 3
    matrix_products.te_general_grouped_gemm(
        weights, True, rows.split(sizes), False, [output], None, sizes, empty, None, True, empty,
        False, empty, 0, False, False, 0,
    )  # fmt: skip
    reference = [part @ weight.T for part, weight in zip(rows.split(sizes), weights, strict=True)]
    torch.testing.assert_close(output, torch.cat(reference))
    with pytest.raises(ValueError, match="6 rows for an output of 7"):
        matrix_products.te_general_grouped_gemm(
            weights, True, rows.split(sizes), False, [output], None, [2, 0, 4], empty, None, True,
            empty, False, empty, 0, False, False, 0,
        )  # fmt: skip


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_equals_torch_adamw(weight_decay: float) -> None:
    reference = random(5, 3).requires_grad_()
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    torch_adam = torch.optim.AdamW([reference], **settings)
    weight = reference.detach().clone()
    mean = torch.zeros(5, 3)
    square = torch.zeros(5, 3)
    skip = torch.zeros(1, dtype=torch.int)
    for step in (1, 2, 3):
        gradient = random(5, 3, seed=step)
        reference.grad = gradient
        torch_adam.step()
        lists = [[gradient], [weight], [mean], [square]]
        numbers = (0.01, 0.9, 0.95, 1e-8, step, 1, 1, weight_decay)
        optimizer_steps.multi_tensor_adam(2048, skip, lists, *numbers)
    torch.testing.assert_close(weight, reference.detach())


def test_norms_and_scaling_of_lists() -> None:
    tensors = [random(3), random(2, 2, seed=1)]
    skip = torch.zeros(1, dtype=torch.int)
    norm, each = optimizer_steps.multi_tensor_l2norm(0, skip, [tensors], True)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    torch.testing.assert_close(norm[0], flat.norm())
    torch.testing.assert_close(each, torch.stack([tensor.norm() for tensor in tensors]))
    targets = [torch.empty_like(tensor) for tensor in tensors]
    optimizer_steps.multi_tensor_scale(0, skip, [tensors, targets], 0.5)
    assert torch.equal(targets[1], tensors[1] * 0.5) and not skip.item()
    optimizer_steps.multi_tensor_scale(0, skip, [[torch.tensor([float("inf")])], [norm]], 1.0)
    assert skip.item()


def test_accumulated_weight_gradient_adds_to_the_sum() -> None:
    total = torch.ones(6, 8)
    rows = random(5, 8)
    gradient = random(5, 6, seed=1)
    optimizer_steps.accumulate_weight_gradient(rows, gradient, total)
    torch.testing.assert_close(total, 1 + gradient.T @ rows)


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32)])
def test_each_block_of_a_matrix_has_its_largest_value(block: tuple[int, int]) -> None:
    matrix = random(130, 200)
    maxima = quantizers.block_maxima(matrix, *block)
    maximum_of_value = quantizers.spread(maxima, matrix.shape, *block)
    assert (matrix.abs() <= maximum_of_value).all()
    assert maxima.max() == matrix.abs().max()
    assert maxima[0, 0] == matrix[: block[0], : block[1]].abs().max()
