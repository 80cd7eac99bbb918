"""Packed sequences inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_span(cu_seqlens, sequence, num_sequences, tokens):
    """(start, end, valid) of a sequence; end = start if cu_seqlens does not run from 0 to `tokens` or falls here."""
    start = tl.load(cu_seqlens + sequence).to(tl.int32)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    last = tl.load(cu_seqlens + num_sequences).to(tl.int32)
    valid = (tl.load(cu_seqlens).to(tl.int32) == 0) & (last == tokens)
    valid = valid & (start >= 0) & (start <= end) & (end <= tokens)
    return start, tl.where(valid, end, start), valid
