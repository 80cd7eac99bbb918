"""Packed micro-batches of random sequences, the same wherever they are made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.mcore.packed_batch import PackedBatch


def sequence(index: int, vocab_size: int = 50) -> torch.Tensor:
    """Return sequence `index` of the test corpus: 5 to 16 int64 tokens."""
    generator = torch.Generator().manual_seed(1000 + index)
    length = int(torch.randint(5, 17, (1,), generator=generator))
    return torch.randint(0, vocab_size, (length,), generator=generator)


def routes_of(index: int, layers: int, experts: int = 8, topk: int = 2) -> torch.Tensor:
    """Return distinct random experts of sequence `index`: uint8 [tokens, layers, topk]."""
    generator = torch.Generator().manual_seed(2000 + index)
    scores = torch.rand(len(sequence(index)), layers, experts, generator=generator)
    return scores.argsort(-1)[..., :topk].to(torch.uint8)


def pack(
    indices: Sequence[int], layers: Sequence[int] | None = None, moe_layers: int = 3
) -> PackedBatch:
    """Pack sequences into one micro-batch.

    layers: the places of this rank's layers among the MoE layers; None packs no routes.
    moe_layers: the number of MoE layers of the model.
    """
    tokens = [sequence(i) for i in indices]
    bounds = torch.tensor([0, *(len(t) for t in tokens)]).cumsum(0).to(torch.int32)
    routes = (
        None
        if layers is None
        else torch.cat([routes_of(i, moe_layers)[:, list(layers)] for i in indices])
    )
    return PackedBatch(
        input_ids=torch.cat(tokens)[None],
        position_ids=torch.cat([torch.arange(len(t)) for t in tokens])[None],
        cu_seqlens=bounds,
        max_seqlen=max(len(t) for t in tokens),
        routes=routes,
    )


def targets_of(indices: Sequence[int]) -> torch.Tensor:
    """Return a target for every row of `pack(indices)`: each sequence rolled by one."""
    return torch.cat([sequence(i).roll(-1) for i in indices])


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Copy a batch without routes to a device."""
    return PackedBatch(
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        cu_seqlens=batch.cu_seqlens.to(device),
        max_seqlen=batch.max_seqlen,
    )
