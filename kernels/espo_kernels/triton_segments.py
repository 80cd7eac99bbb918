"""Packed sequences and the groups of their tokens inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_span(cu_seqlens, sequence, num_sequences, tokens):
    """(start, end, valid) of a sequence; end = start if cu_seqlens does not run from 0 to `tokens`
    or falls here.
    """
    start = tl.load(cu_seqlens + sequence).to(tl.int32)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    last = tl.load(cu_seqlens + num_sequences).to(tl.int32)
    valid = (tl.load(cu_seqlens).to(tl.int32) == 0) & (last == tokens)
    valid = valid & (start >= 0) & (start <= end) & (end <= tokens)
    return start, tl.where(valid, end, start), valid


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
