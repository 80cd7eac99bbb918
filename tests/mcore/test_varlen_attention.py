"""Variable-length attention with the signature of each torch version.

The attention functions themselves are written out here.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.mcore.layers.varlen_attention import VarlenAttention

LENGTHS = [7, 40, 9, 1]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def each_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    assert gqa or query.shape[1] == key.shape[1]
    rows = []
    for start, stop in itertools.pairwise(bounds.tolist()):
        q, k, v = (t[start:stop].transpose(0, 1)[None] for t in (query, key, value))
        rows.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)[0]
        )
    return torch.cat([row.transpose(0, 1) for row in rows])


def torch_2_10(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> torch.Tensor:
    assert is_causal and (max_q, max_k) == (40, 40) and torch.equal(cu_seq_q, cu_seq_k)
    return each_alone(query, key, value, cu_seq_q, None, False)


def torch_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    assert window_size == (-1, 0)
    return each_alone(query, key, value, cu_seq_q, scale, False)


def torch_2_12(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert window_size == (-1, 0)
    return each_alone(query, key, value, cu_seq_q, scale, enable_gqa)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("function", [torch_2_10, torch_2_11, torch_2_12])
def test_every_signature_attends_within_each_sequence(
    function: Any, groups: int, scale: float | None
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8) for heads in (4, groups, groups))
    expected_output = each_alone(query, key, value, BOUNDS, scale, True)
    output = VarlenAttention(function)(
        query, key, value, cu_seqlens=BOUNDS, max_seqlen=40, scale=scale
    )
    torch.testing.assert_close(output, expected_output, rtol=1e-5, atol=1e-6)


def test_installed_torch_has_it_for_cuda_only() -> None:
    attention = VarlenAttention()
    x = torch.zeros(3, 4, 8, dtype=torch.bfloat16)
    assert attention.is_available
    assert not attention.supports(x, x, x), "on a CPU"


class OnCuda(torch.Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "dims", "is_supported"),
    [
        (torch.bfloat16, (64, 64, 64), True),
        (torch.float16, (256, 256, 256), True),
        (torch.float32, (64, 64, 64), False),
        (torch.bfloat16, (192, 192, 128), False),  # multi-head latent attention
        (torch.bfloat16, (12, 12, 12), False),
        (torch.bfloat16, (264, 264, 264), False),
    ],
)
def test_unsupported_dtypes_and_head_sizes_are_rejected(
    dtype: torch.dtype, dims: tuple[int, ...], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    inputs = [torch.zeros(3, 4, dim, dtype=dtype).as_subclass(OnCuda) for dim in dims]
    assert VarlenAttention(torch_2_12).supports(*inputs) is is_supported


@pytest.mark.parametrize(("capability", "is_supported"), [((7, 5), False), ((8, 0), True)])
def test_gpus_before_ampere_have_no_flash_attention(
    capability: tuple[int, int], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = torch.zeros(3, 4, 64, dtype=torch.bfloat16).as_subclass(OnCuda)
    assert VarlenAttention(torch_2_12).supports(x, x, x) is is_supported
