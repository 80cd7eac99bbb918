"""Packed sequences and the groups of their tokens inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rises(cu_seqlens, num_sequences, tokens):
    """True if cu_seqlens runs from 0 to `tokens` without decreasing."""
    num_falls = tl.zeros([], dtype=tl.int32)
    for begin in range(0, num_sequences, 256):
        sequence = begin + tl.arange(0, 256)
        inside = sequence < num_sequences
        start = tl.load(cu_seqlens + sequence, mask=inside, other=0)
        end = tl.load(cu_seqlens + sequence + 1, mask=inside, other=0)
        num_falls += tl.sum((end < start).to(tl.int32), axis=0)
    first = tl.load(cu_seqlens).to(tl.int64)
    last = tl.load(cu_seqlens + num_sequences).to(tl.int64)
    return (first == 0) & (last == tokens) & (num_falls == 0)


@triton.jit
def sequence_span(cu_seqlens, sequence, num_sequences, tokens):
    """(start, end, keep_end, valid): the tokens of a sequence; valid as `rises` says.

    If it is False, the sequences share all tokens equally, and none is to be kept: keep_end is
    start, else end. So each token is in one span whatever cu_seqlens holds, and kernels that write
    their whole span leave no token unwritten.
    """
    valid = rises(cu_seqlens, num_sequences, tokens)
    share = tl.cdiv(tokens, num_sequences)
    first = tl.minimum(sequence * share, tokens)
    start = tl.where(valid, tl.load(cu_seqlens + sequence).to(tl.int32), first)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    end = tl.where(valid, end, tl.minimum(first + share, tokens))
    return start, end, tl.where(valid, end, start), valid


@triton.jit
def tile_row(matrix, index):
    """matrix[index] of a [rows, PADDED] register tile."""
    row = tl.arange(0, matrix.shape[0])[:, None]
    return tl.sum(tl.where(row == index, matrix, 0.0), axis=0)


@triton.jit
def add_to_row(matrix, index, vector):
    row = tl.arange(0, matrix.shape[0])[:, None]
    return tl.where(row == index, matrix + vector[None, :], matrix)


@triton.jit
def by_group(values, tau, K: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] sums of a block's values by group."""
    group = tl.arange(0, PADDED)
    sums = tl.zeros([PADDED], dtype=tl.float32)
    for k in tl.static_range(K):
        sums += tl.where(group == k, tl.sum(tl.where(tau == k, values, 0.0), axis=0), 0.0)
    return sums


@triton.jit
def to_tokens(vector, tau, K: tl.constexpr, PADDED: tl.constexpr):
    """Each token's entry of a [PADDED] vector; 0 for tokens of no group."""
    group = tl.arange(0, PADDED)
    values = tl.zeros(tau.shape, dtype=tl.float32)
    for k in tl.static_range(K):
        values = tl.where(tau == k, tl.sum(tl.where(group == k, vector, 0.0), axis=0), values)
    return values
