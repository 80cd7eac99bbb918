"""Entropy groups on a GPU: one launch, one program per sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from espo_kernels.espo_groups.settings import GroupSettings
from espo_kernels.segments import MASKED
from espo_kernels.triton_segments import sequence_span

_WIDEST_BLOCK = 4096


@triton.jit
def _descending_key(e):
    """uint32 that orders as the float32 does, NaN highest; −0 and 0 are equal."""
    e = tl.where(e == 0.0, 0.0, e)
    bits = e.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return tl.where(e != e, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def _load_tokens(entropies, mask, start, end, begin, MASK: tl.constexpr, BLOCK: tl.constexpr):
    token = start + begin + tl.arange(0, BLOCK)
    inside = token < end
    keep = inside
    if MASK:
        keep = inside & (tl.load(mask + token, mask=inside, other=0) != 0)
    e = tl.load(entropies + token, mask=keep, other=0.0).to(tl.float32)
    return token, inside, keep, e


@triton.jit
def _digit_histogram(
    entropies, mask, start, end, shift, prefix, fixed_bits, MASK: tl.constexpr, BLOCK: tl.constexpr
):
    """[256] counts of the key's byte at `shift`, over the tokens whose keys have the prefix."""
    histogram = tl.zeros([256], dtype=tl.int32)
    for begin in range(0, end - start, BLOCK):
        _token, _inside, keep, e = _load_tokens(entropies, mask, start, end, begin, MASK, BLOCK)
        key = _descending_key(e)
        digits = ((key >> shift) & 0xFF).to(tl.int32)
        histogram += tl.histogram(digits, 256, mask=keep & ((key & fixed_bits) == prefix))
    return histogram


@triton.jit
def _edge(entropies, mask, start, end, rank, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """(key of the rank-th highest entropy, the number of tokens with that key before the edge).

    Ranks count from 1.
    """
    prefix = tl.zeros([], dtype=tl.uint32)
    fixed_bits = tl.zeros([], dtype=tl.uint32)  # the key's bits that the prefix fixes
    remaining = rank
    position = tl.full([], 24, dtype=tl.int32)
    for _level in range(4):
        shift = position.to(tl.uint32)
        histogram = _digit_histogram(
            entropies, mask, start, end, shift, prefix, fixed_bits, MASK, BLOCK
        )
        at_least = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
        digit = tl.sum((at_least >= remaining).to(tl.int32), axis=0) - 1
        remaining -= tl.sum(tl.where(tl.arange(0, 256) > digit, histogram, 0), axis=0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
        fixed_bits = fixed_bits | (tl.full([], 0xFF, dtype=tl.uint32) << shift)
        position -= 8
    return prefix, remaining


@triton.jit
def _edges(
    entropies,
    mask,
    start,
    end,
    BOUNDS: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[PADDED] of each bound: `_edge` at its rank among the sequence's kept tokens."""
    n = tl.zeros([], dtype=tl.int64)
    for begin in range(0, end - start, BLOCK):
        _token, _inside, keep, _e = _load_tokens(entropies, mask, start, end, begin, MASK, BLOCK)
        n += tl.sum(keep.to(tl.int32), axis=0)
    group = tl.arange(0, PADDED)
    edge_key = tl.zeros([PADDED], dtype=tl.uint32)
    edge_ties = tl.zeros([PADDED], dtype=tl.int32)
    for j in tl.static_range(NUM_BOUNDS):
        rank = ((n * BOUNDS[2 * j] + (BOUNDS[2 * j + 1] - 1)) // BOUNDS[2 * j + 1]).to(tl.int32)
        edge, ties = _edge(entropies, mask, start, end, rank, MASK, BLOCK)
        edge_key = tl.where(group == j, edge, edge_key)
        edge_ties = tl.where(group == j, ties, edge_ties)
    return edge_key, edge_ties


@triton.jit
def _first_groups(
    key, keep, edge_key, edge_ties, seen_ties, NUM_BOUNDS: tl.constexpr, PADDED: tl.constexpr
):
    """(group of each token of a block, ties at each edge up to the end of this block)."""
    group = tl.arange(0, PADDED)
    tau = tl.zeros_like(key).to(tl.int32)
    for j in tl.static_range(NUM_BOUNDS):
        edge = tl.max(tl.where(group == j, edge_key, 0), axis=0)
        is_tie = (keep & (key == edge)).to(tl.int32)
        position = tl.sum(tl.where(group == j, seen_ties, 0), axis=0) + tl.cumsum(is_tie, axis=0)
        ties = tl.sum(tl.where(group == j, edge_ties, 0), axis=0)
        before = (key > edge) | ((is_tie == 1) & (position <= ties))
        tau += tl.where(before, 0, 1)
        seen_ties += tl.where(group == j, tl.sum(is_tie, axis=0), 0)
    return tau, seen_ties


@triton.jit
def _clip_width(sums, members, scale, min_clip, fixed_clip, FIXED: tl.constexpr):
    """See `reference.clip_width`. NaN for infinite entropies.

    Comparisons keep a NaN that a maximum might drop.
    """
    mean = sums / tl.maximum(members, 1).to(tl.float32)
    mean = mean + (mean - mean)
    width = mean * scale
    width = tl.where(width < min_clip, min_clip, width)
    if FIXED:
        width = tl.where(mean == mean, fixed_clip, mean)
    return tl.where(members > 0, width, 0.0)


@triton.jit
def _add_members(sums, members, e, tau, keep, NUM_BOUNDS: tl.constexpr, PADDED: tl.constexpr):
    """Add a block's entropies and counts to its groups."""
    group = tl.arange(0, PADDED)
    for k in tl.static_range(NUM_BOUNDS + 1):
        mine = keep & (tau == k)
        sums += tl.where(group == k, tl.sum(tl.where(mine, e, 0.0), axis=0), 0.0)
        members += tl.where(group == k, tl.sum(mine.to(tl.int32), axis=0), 0)
    return sums, members


@triton.jit
def _assign_groups(
    entropies,
    mask,
    group_id,
    start,
    end,
    edge_key,
    edge_ties,
    NUM_BOUNDS: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write group_id of a sequence; ([PADDED] sums of entropies, [PADDED] counts)."""
    seen_ties = tl.zeros([PADDED], dtype=tl.int32)
    sums = tl.zeros([PADDED], dtype=tl.float32)
    members = tl.zeros([PADDED], dtype=tl.int32)
    for begin in range(0, end - start, BLOCK):
        token, inside, keep, e = _load_tokens(entropies, mask, start, end, begin, MASK, BLOCK)
        key = _descending_key(e)
        tau, seen_ties = _first_groups(
            key, keep, edge_key, edge_ties, seen_ties, NUM_BOUNDS, PADDED
        )
        sums, members = _add_members(sums, members, e, tau, keep, NUM_BOUNDS, PADDED)
        tl.store(group_id + token, tl.where(keep, tau, 255).to(tl.uint8), mask=inside)
    return sums, members


@triton.jit
def _store_widths(
    clip,
    count,
    sequence,
    width,
    members,
    NUM_BOUNDS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write a sequence's row of clip[B, K] and count[B, K]."""
    group = tl.arange(0, PADDED)
    row = sequence * (NUM_BOUNDS + 1) + group
    tl.store(clip + row, width, mask=group <= NUM_BOUNDS)
    tl.store(count + row, members, mask=group <= NUM_BOUNDS)


@triton.jit
def espo_groups_kernel(
    entropies,
    cu_seqlens,
    mask,
    group_id,
    clip,
    count,
    tokens,
    num_sequences,
    scale,
    min_clip,
    fixed_clip,
    BOUNDS: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    PADDED: tl.constexpr,
    FIXED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of one sequence.

    BOUNDS: numerator, denominator of each group's end. PADDED: length of vectors with an entry per
    group.
    """
    sequence = tl.program_id(0)
    start, end, valid = sequence_span(cu_seqlens, sequence, num_sequences, tokens)
    edge_key, edge_ties = _edges(
        entropies, mask, start, end, BOUNDS, NUM_BOUNDS, PADDED, MASK, BLOCK
    )
    sums, members = _assign_groups(
        entropies,
        mask,
        group_id,
        start,
        end,
        edge_key,
        edge_ties,
        NUM_BOUNDS,
        PADDED,
        MASK,
        BLOCK,
    )
    width = _clip_width(sums, members, scale, min_clip, fixed_clip, FIXED)
    width = tl.where(valid, width, float("nan"))
    _store_widths(clip, count, sequence, width, members, NUM_BOUNDS, PADDED)


def groups_triton(
    old_entropies: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    settings: GroupSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(group_id[T] uint8, clip[B, K] float32, count[B, K] int32)."""
    device = old_entropies.device
    tokens = old_entropies.numel()
    num_sequences = cu_seqlens.numel() - 1
    K = settings.num_groups
    group_id = torch.full((tokens,), MASKED, dtype=torch.uint8, device=device)
    clip = torch.empty(num_sequences, K, dtype=torch.float32, device=device)
    count = torch.empty(num_sequences, K, dtype=torch.int32, device=device)
    if num_sequences:
        block = min(_WIDEST_BLOCK, max(256, triton.next_power_of_2(tokens)))
        espo_groups_kernel[(num_sequences,)](
            old_entropies,
            cu_seqlens,
            group_id if mask is None else mask,
            group_id,
            clip,
            count,
            tokens,
            num_sequences,
            settings.scale,
            settings.min_clip,
            settings.fixed_clip or 0.0,
            BOUNDS=tuple(number for bound in settings.bounds for number in bound),
            NUM_BOUNDS=K - 1,
            PADDED=triton.next_power_of_2(K),
            FIXED=settings.fixed_clip is not None,
            MASK=mask is not None,
            BLOCK=block,
            num_warps=max(4, block // 512),
        )
    return group_id, clip, count
