"""Entropy groups on a GPU: a radix search for the edges of the groups, then their assignment.

Each sequence is divided into parts, one program each. A launch for each byte of the keys counts
the bytes of each part. The programs of the next launch add up the counts of all parts of their
sequence, and so find the byte of the edge. No program waits for another, and nothing is added
atomically, so that every run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from espo_kernels.espo_groups.settings import GroupSettings
from espo_kernels.triton_launches import launch
from espo_kernels.triton_segments import rises, sequence_span

_LEVELS = 4
"""Bytes of a key."""
_BLOCK = 2048
# Enough programs for every multiprocessor of a GPU, several on each.
_PROGRAMS = 1024
_MOST_PARTS = 128
# Without a kernel for each batch size, and for each alignment of what callers may have sliced.
_SIZES = ["tokens", "num_sequences", "level", "num_parts"]
_INPUTS = ["entropies", "cu_seqlens", "mask"]
DIGITS = tl.constexpr(256)
PARTS_PER_LOAD = tl.constexpr(16)


@triton.jit
def _descending_key(e):
    """uint32 that orders as the float32 does, NaN highest; −0 and 0 are equal."""
    e = tl.where(e == 0.0, 0.0, e)
    bits = e.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(e != e, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def _part_span(cu_seqlens, num_sequences, tokens, BLOCK: tl.constexpr):
    """(start, end, end of the tokens to keep) of this program's part.

    Programs: sequence, part. Parts are whole blocks from the sequence's start. Without a valid
    cu_seqlens no token is kept.
    """
    sequence = tl.program_id(0)
    start, end, _keep_end, valid = sequence_span(cu_seqlens, sequence, num_sequences, tokens)
    length = tl.cdiv(tl.cdiv(end - start, tl.num_programs(1)), BLOCK) * BLOCK
    first = tl.minimum(start + tl.program_id(1) * length, end)
    last = tl.minimum(first + length, end)
    return first, last, tl.where(valid, last, first)


@triton.jit
def _load_tokens(entropies, mask, begin, end, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """(token indices, kept, entropies) of the block at `begin`."""
    token = begin + tl.arange(0, BLOCK)
    keep = token < end
    if MASK:
        keep = keep & (tl.load(mask + token, mask=keep, other=0) != 0)
    return token, keep, tl.load(entropies + token, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _rank(n, bound, BOUNDS: tl.constexpr, NUM_BOUNDS: tl.constexpr):
    """The number of tokens before a bound, of n: ceil(n · bound)."""
    rank = tl.zeros([], dtype=tl.int32)
    for j in tl.static_range(NUM_BOUNDS):
        exact = (n.to(tl.int64) * BOUNDS[2 * j] + (BOUNDS[2 * j + 1] - 1)) // BOUNDS[2 * j + 1]
        rank = tl.where(bound == j, exact.to(tl.int32), rank)
    return rank


@triton.jit
def _sum_parts(histograms, row):
    """([DIGITS] counts of all parts, [DIGITS] counts of the parts before this program's)."""
    num_parts = tl.num_programs(1)
    digit = tl.arange(0, DIGITS)[None, :]
    total = tl.zeros([DIGITS], dtype=tl.int32)
    before = tl.zeros([DIGITS], dtype=tl.int32)
    for begin in range(0, num_parts, PARTS_PER_LOAD):
        part = begin + tl.arange(0, PARTS_PER_LOAD)[:, None]
        at = histograms + (row * num_parts + part) * DIGITS + digit
        counts = tl.load(at, mask=part < num_parts, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(part < tl.program_id(1), counts, 0), axis=0)
    return total, before


@triton.jit
def _row(level, bound, num_sequences, NUM_BOUNDS: tl.constexpr):
    """The row of histograms and edges of this program's sequence, for a bound at a level."""
    slot = (level % 2) * NUM_BOUNDS + bound
    return slot.to(tl.int64) * num_sequences + tl.program_id(0)


@triton.jit
def _digit(histogram, n, rank):
    """(byte of the key with a rank, its rank among the keys with that byte). n: all keys."""
    at_least = n - tl.cumsum(histogram, axis=0) + histogram
    digit = tl.sum((at_least >= rank).to(tl.int32), axis=0) - 1
    is_above = tl.arange(0, DIGITS) > digit
    return digit, rank - tl.sum(tl.where(is_above, histogram, 0), axis=0)


@triton.jit
def _edge(
    histograms,
    edges,
    level,
    bound,
    num_sequences,
    BOUNDS: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
):
    """The first `level` bytes of the key at a bound, from the counts of the level before.

    Returns (these bytes; the rank of the bound among the keys that have them; the number of such
    keys in the parts before this program's). Ranks count from 1.
    """
    row = _row(level - 1, bound, num_sequences, NUM_BOUNDS)
    histogram, before = _sum_parts(histograms, row)
    n = tl.sum(histogram, axis=0)
    prefix = tl.load(edges + 2 * row, mask=level > 1, other=0).to(tl.uint32, bitcast=True)
    rank = tl.load(edges + 2 * row + 1, mask=level > 1, other=0)
    rank = tl.where(level == 1, _rank(n, bound, BOUNDS, NUM_BOUNDS), rank)
    digit, rank = _digit(histogram, n, rank)
    prefix = prefix | (digit.to(tl.uint32) << (32 - 8 * level).to(tl.uint32))
    return prefix, rank, tl.sum(tl.where(tl.arange(0, DIGITS) == digit, before, 0), axis=0)


@triton.jit
def _count_digits(
    entropies, mask, begin, end, prefix, level, MASK: tl.constexpr, BLOCK: tl.constexpr
):
    """[DIGITS] counts of the keys' byte at a level, over the keys with the prefix before it."""
    shift = (24 - 8 * level).to(tl.uint32)
    histogram = tl.zeros([DIGITS], dtype=tl.int32)
    for at in range(begin, end, BLOCK):
        _token, keep, e = _load_tokens(entropies, mask, at, end, MASK, BLOCK)
        # The highest byte has no bytes before it, and a shift by 32 bits is undefined.
        above = _descending_key(e) >> shift
        has_prefix = (above >> 8) == ((prefix >> shift) >> 8)
        digits = (above & 0xFF).to(tl.int32)
        histogram += tl.histogram(digits, DIGITS, mask=keep & has_prefix)
    return histogram


@triton.jit(do_not_specialize=_SIZES[:3], do_not_specialize_on_alignment=_INPUTS)
def espo_digits_kernel(
    entropies,
    cu_seqlens,
    mask,
    histograms,
    edges,
    tokens,
    num_sequences,
    level,
    BOUNDS: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of a part of a sequence, for one bound: counts of the byte of its keys at a level.

    It counts the keys that share the bytes before with the key at the bound, the highest byte being
    level 0. BOUNDS: numerator, denominator of each group's end. Two consecutive levels use
    different rows of histograms[2, bounds, B, parts, DIGITS] and of edges[2, bounds, B, 2]: the
    bytes before, and the rank of the bound among the keys that have them.
    """
    part = tl.program_id(1)
    bound = tl.program_id(2)
    begin, _end, keep_end = _part_span(cu_seqlens, num_sequences, tokens, BLOCK)
    row = _row(level, bound, num_sequences, NUM_BOUNDS)
    prefix = tl.zeros([], dtype=tl.uint32)
    if (level > 0) & (begin < keep_end):
        prefix, rank, _before = _edge(
            histograms, edges, level, bound, num_sequences, BOUNDS, NUM_BOUNDS
        )
        if part == 0:
            tl.store(edges + 2 * row, prefix.to(tl.int32, bitcast=True))
            tl.store(edges + 2 * row + 1, rank)
    histogram = _count_digits(entropies, mask, begin, keep_end, prefix, level, MASK, BLOCK)
    counts = histograms + (row * tl.num_programs(1) + part) * DIGITS
    tl.store(counts + tl.arange(0, DIGITS), histogram)


@triton.jit
def _edges(
    histograms,
    edges,
    num_sequences,
    BOUNDS: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """[PADDED] of each bound: its key, the tokens with that key before it, and the tokens with that
    key in the parts before this program's.
    """
    group = tl.arange(0, PADDED)
    edge_key = tl.zeros([PADDED], dtype=tl.uint32)
    edge_ties = tl.zeros([PADDED], dtype=tl.int32)
    seen_ties = tl.zeros([PADDED], dtype=tl.int32)
    level = tl.full([], 4, dtype=tl.int32)
    for j in tl.static_range(NUM_BOUNDS):
        bound = tl.full([], j, dtype=tl.int32)
        key, ties, before = _edge(
            histograms, edges, level, bound, num_sequences, BOUNDS, NUM_BOUNDS
        )
        edge_key = tl.where(group == j, key, edge_key)
        edge_ties = tl.where(group == j, ties, edge_ties)
        seen_ties = tl.where(group == j, before, seen_ties)
    return edge_key, edge_ties, seen_ties


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
def _add_members(sums, members, e, tau, keep, NUM_BOUNDS: tl.constexpr, PADDED: tl.constexpr):
    """Add a block's entropies and counts to its groups."""
    group = tl.arange(0, PADDED)
    for k in tl.static_range(NUM_BOUNDS + 1):
        mine = keep & (tau == k)
        total = tl.sum(tl.where(mine, e, 0.0), axis=0).to(tl.float64)
        sums += tl.where(group == k, total, 0.0)
        members += tl.where(group == k, tl.sum(mine.to(tl.int32), axis=0), 0)
    return sums, members


@triton.jit
def _store_part(sums, members, total, count, NUM_BOUNDS: tl.constexpr, PADDED: tl.constexpr):
    """Write this program's row of sums[B, parts, K] and members[B, parts, K]."""
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    group = tl.arange(0, PADDED)
    at = part * (NUM_BOUNDS + 1) + group
    tl.store(sums + at, total, mask=group <= NUM_BOUNDS)
    tl.store(members + at, count, mask=group <= NUM_BOUNDS)


@triton.jit(do_not_specialize=_SIZES[:2], do_not_specialize_on_alignment=_INPUTS)
def espo_groups_kernel(
    entropies,
    cu_seqlens,
    mask,
    histograms,
    edges,
    group_id,
    sums,
    members,
    tokens,
    num_sequences,
    BOUNDS: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of a part of a sequence: group_id of its tokens, and what `espo_widths_kernel` needs.

    sums[B, parts, K] float64 of entropies, members[B, parts, K]. PADDED: length of vectors with an
    entry per group.
    """
    begin, end, keep_end = _part_span(cu_seqlens, num_sequences, tokens, BLOCK)
    edge_key, edge_ties, seen_ties = _edges(
        histograms, edges, num_sequences, BOUNDS, NUM_BOUNDS, PADDED
    )
    total = tl.zeros([PADDED], dtype=tl.float64)
    count = tl.zeros([PADDED], dtype=tl.int32)
    for at in range(begin, end, BLOCK):
        token, keep, e = _load_tokens(entropies, mask, at, keep_end, MASK, BLOCK)
        tau, seen_ties = _first_groups(
            _descending_key(e), keep, edge_key, edge_ties, seen_ties, NUM_BOUNDS, PADDED
        )
        total, count = _add_members(total, count, e, tau, keep, NUM_BOUNDS, PADDED)
        tl.store(group_id + token, tl.where(keep, tau, 255).to(tl.uint8), mask=token < end)
    _store_part(sums, members, total, count, NUM_BOUNDS, PADDED)


@triton.jit
def _clip_width(total, count, scale, min_clip, fixed_clip, FIXED: tl.constexpr):
    """See `reference.clip_width`. NaN for infinite entropies.

    Comparisons keep a NaN that a maximum might drop.
    """
    mean = (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    mean = mean + (mean - mean)
    width = mean * scale
    width = tl.where(width < min_clip, min_clip, width)
    if FIXED:
        width = tl.where(mean == mean, fixed_clip, mean)
    return tl.where(count > 0, width, 0.0)


@triton.jit
def _sum_members(sums, members, num_parts, NUM_BOUNDS: tl.constexpr, PADDED: tl.constexpr):
    """([PADDED] sums of entropies, [PADDED] counts) of this program's sequence."""
    total = tl.zeros([PADDED], dtype=tl.float64)
    count = tl.zeros([PADDED], dtype=tl.int32)
    group = tl.arange(0, PADDED)[None, :]
    for begin in range(0, num_parts, PARTS_PER_LOAD):
        part = begin + tl.arange(0, PARTS_PER_LOAD)[:, None]
        at = (tl.program_id(0).to(tl.int64) * num_parts + part) * (NUM_BOUNDS + 1) + group
        inside = (part < num_parts) & (group <= NUM_BOUNDS)
        total += tl.sum(tl.load(sums + at, mask=inside, other=0.0), axis=0)
        count += tl.sum(tl.load(members + at, mask=inside, other=0), axis=0)
    return total, count


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_INPUTS[1:2])
def espo_widths_kernel(
    cu_seqlens,
    sums,
    members,
    clip,
    count,
    tokens,
    num_sequences,
    num_parts,
    scale,
    min_clip,
    fixed_clip,
    NUM_BOUNDS: tl.constexpr,
    PADDED: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Program of a sequence: its row of clip[B, K] and count[B, K], from the sums of its parts."""
    total, members_of_group = _sum_members(sums, members, num_parts, NUM_BOUNDS, PADDED)
    width = _clip_width(total, members_of_group, scale, min_clip, fixed_clip, FIXED)
    width = tl.where(rises(cu_seqlens, num_sequences, tokens), width, float("nan"))
    group = tl.arange(0, PADDED)
    row = tl.program_id(0).to(tl.int64) * (NUM_BOUNDS + 1) + group
    tl.store(clip + row, width, mask=group <= NUM_BOUNDS)
    tl.store(count + row, members_of_group, mask=group <= NUM_BOUNDS)


def groups_triton(
    old_entropies: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    settings: GroupSettings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(group_id[T] uint8, clip[B, K] float32, count[B, K] int32)."""
    device = old_entropies.device
    num_sequences = cu_seqlens.numel() - 1
    K = settings.num_groups
    clip = torch.empty(num_sequences, K, dtype=torch.float32, device=device)
    count = torch.empty(num_sequences, K, dtype=torch.int32, device=device)
    group_id = torch.empty(old_entropies.shape, dtype=torch.uint8, device=device)
    if num_sequences:
        inputs = (old_entropies, cu_seqlens, group_id if mask is None else mask)
        sums, members = _assign(inputs, group_id, mask is not None, settings)
        launch(
            espo_widths_kernel,
            (num_sequences,),
            cu_seqlens,
            sums,
            members,
            clip,
            count,
            old_entropies.numel(),
            num_sequences,
            sums.shape[1],
            settings.scale,
            float(settings.min_clip),
            float(settings.fixed_clip or 0),
            NUM_BOUNDS=K - 1,
            PADDED=triton.next_power_of_2(K),
            FIXED=settings.fixed_clip is not None,
            num_warps=1,
        )
    return group_id, clip, count


def _assign(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group_id: torch.Tensor,
    has_mask: bool,
    settings: GroupSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill group_id. Returns [B, parts, K] sums of entropies, and numbers of tokens.

    inputs: entropies, cu_seqlens, and the mask, which is unread unless has_mask.
    """
    tokens = group_id.numel()
    num_sequences = inputs[1].numel() - 1
    K = settings.num_groups
    parts = _num_parts(tokens, num_sequences)
    options = {
        "BOUNDS": tuple(number for bound in settings.bounds for number in bound),
        "NUM_BOUNDS": K - 1,
        "MASK": has_mask,
        "BLOCK": _BLOCK,
        "num_warps": 8,
    }
    edges = _find_edges(inputs, parts, options)
    shape = (num_sequences, parts, K)
    sums = torch.empty(shape, dtype=torch.float64, device=group_id.device)
    members = torch.empty(shape, dtype=torch.int32, device=group_id.device)
    launch(
        espo_groups_kernel,
        (num_sequences, parts),
        *inputs,
        *edges,
        group_id,
        sums,
        members,
        tokens,
        num_sequences,
        PADDED=triton.next_power_of_2(K),
        **options,
    )
    return sums, members


def _find_edges(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], parts: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the levels of the search. Returns histograms and edges of its last levels."""
    tokens = inputs[0].numel()
    num_sequences = inputs[1].numel() - 1
    num_bounds = options["NUM_BOUNDS"]
    device = inputs[0].device
    shape = (2, num_bounds, num_sequences, parts, DIGITS.value)
    histograms = torch.empty(shape, dtype=torch.int32, device=device)
    edges = torch.empty(2, num_bounds, num_sequences, 2, dtype=torch.int32, device=device)
    for level in range(_LEVELS if num_bounds else 0):
        launch(
            espo_digits_kernel,
            (num_sequences, parts, num_bounds),
            *inputs,
            histograms,
            edges,
            tokens,
            num_sequences,
            level,
            **options,
        )
    return histograms, edges


def _num_parts(tokens: int, num_sequences: int) -> int:
    """The number of parts of each sequence: few blocks in each, and enough programs for a GPU."""
    parts = min(_MOST_PARTS, _PROGRAMS // num_sequences, triton.cdiv(tokens, _BLOCK))
    return max(1, parts)
