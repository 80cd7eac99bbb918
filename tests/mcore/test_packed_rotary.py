"""The rotary embedding of a packed batch equals the embedding of each sequence alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DIMENSION = 8


@dataclass(frozen=True)
class Group:
    """A process group as the rotation uses it."""

    num_ranks: int
    own_rank: int

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.own_rank


def rotate(
    kind: Any, tensor: torch.Tensor, bounds: torch.Tensor, cp_size: int, cp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the rows of a rank, with angles of a class. Returns the result and a gradient."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(bounds.diff().max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    group: Any = Group(cp_size, cp_rank)
    embedding = kind(DIMENSION, 1.0, use_cpu_initialization=True, cp_group=group)
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    length = embedding.get_rotary_seq_len(None, None, tensor, config, params)
    assert length == longest
    angles = embedding(length, packed_seq=True, cp_group=group)
    rows = tensor.clone().requires_grad_()
    result = apply_rotary_pos_emb(rows, angles, config, cu_seqlens=bounds, cp_group=group)
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result))
    assert rows.grad is not None
    return result.detach(), rows.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_all_sequences_are_rotated_at_once_with_the_same_bits(
    megatron: Any, dtype: torch.dtype, cp_size: int, cp_rank: int, lengths: list[int]
) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_rl.mcore.layers.packed_rotary import PackedRotaryEmbedding

    # Context parallelism cuts each sequence into an even number of equal parts
    sizes = [length * 2 * cp_size if cp_size > 1 else length for length in lengths]
    bounds = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(sum(sizes))
    num_rows = sum(sizes) // cp_size
    tensor = torch.randn(num_rows, 3, DIMENSION, generator=generator).to(dtype)
    expected = rotate(RotaryEmbedding, tensor, bounds, cp_size, cp_rank)
    results = rotate(PackedRotaryEmbedding, tensor, bounds, cp_size, cp_rank)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == dtype and torch.equal(result, other)


def test_a_batch_that_is_not_packed_has_angles_by_position(megatron: Any) -> None:
    from megatron_rl.mcore.layers.packed_rotary import PackedRotaryEmbedding

    embedding = PackedRotaryEmbedding(DIMENSION, 1.0, use_cpu_initialization=True)
    config: Any = SimpleNamespace(sequence_parallel=False, context_parallel_size=1)
    length = embedding.get_rotary_seq_len(None, None, torch.zeros(7, 1, 4), config)
    assert length == 7 and embedding(length).shape == (7, 1, 1, DIMENSION)


def test_a_model_rotates_packed_batches_at_once(megatron: Any, checkpoint: Path) -> None:
    """Megatron's loop over sequences takes a third of a step with short responses."""
    from megatron_rl.mcore.layers.packed_rotary import PackedRotaryEmbedding
    from tests.mcore.test_hf_weights import build

    (model,), _ = build(checkpoint)
    assert isinstance(model.rotary_pos_emb, PackedRotaryEmbedding)
