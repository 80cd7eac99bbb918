"""The norm of all gradients and their scaling equal Megatron's, bit for bit on CPUs."""

from typing import Any

import megatron.core.utils as megatron_utils
import pytest
import torch
from megatron.core.optimizer import clip_grads

from megatron_rl.mcore.seams import norm_of_all, scale_all


def gradients(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of many sizes and scales, also empty, without dimensions, and not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(int(n),) for n in torch.randint(1, 5000, (60,), generator=generator)]
    sizes += [(), (0,), (7, 33), (1,)]
    scales = torch.logspace(-6, 3, len(sizes)).tolist()
    tensors = [
        torch.randn(size, generator=generator).mul(scale).to(dtype)
        for size, scale in zip(sizes, scales, strict=True)
    ]
    return [*tensors, torch.randn(40, 30, generator=generator).to(dtype).t()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_norm_has_the_bits_of_megatrons_function(
    megatron: Any, seed: int, dtype: torch.dtype
) -> None:
    tensors = gradients(seed, dtype)
    norm, each = norm_of_all(0, None, [tensors], False)
    reference, _ = megatron_utils.local_multi_tensor_l2_norm(0, None, [tensors], False)
    assert norm.dtype == torch.float32 and torch.equal(norm, reference)
    assert norm.shape == (1,) and each is None


def test_norm_keeps_what_is_not_finite(megatron: Any) -> None:
    for value in (float("nan"), float("inf")):
        norm, _ = norm_of_all(0, None, [[torch.ones(3), torch.tensor([1.0, value])]], False)
        assert not norm.isfinite()


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 1e-7])
def test_scaled_gradients_have_the_bits_of_megatrons_function(megatron: Any, factor: float) -> None:
    ours, theirs = (gradients(1, torch.float32) for _ in range(2))
    places = [tensor.data_ptr() for tensor in ours]
    scale_all(0, None, [ours, ours], factor)
    megatron_utils.local_multi_tensor_scale(0, None, [theirs, theirs], factor)
    assert [tensor.data_ptr() for tensor in ours] == places
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_megatron_clips_with_these_functions(megatron: Any) -> None:
    assert clip_grads.l2_norm_impl is norm_of_all
    assert clip_grads.multi_tensor_scale_impl is scale_all
    tensors = gradients(0, torch.float32)
    reference = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    norm = clip_grads.get_grad_norm_fp32(tensors)
    assert norm == pytest.approx(float(reference), rel=1e-6)
