"""Row loops compiled by numba, over logits given as raw bits.

A row's exponentials are taken relative to an anchor, a logit that no other exceeds by more than a
few powers of two. The anchor need not be the maximum, so one pass over a block is enough: it sums
and finds the block's maximum, and only a block that rises too far above the anchor is summed again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from espo_kernels.token_logprob_entropy.numba_bits import (
    from_ordered,
    load,
    nearest_integer,
    ordered,
    power_of_two,
    prefer_wide_vectors,
    prefetch,
    store,
)

_REORDER = {"reassoc", "contract", "nsz", "arcp"}
# logits between two looks at the anchor: a block that is summed again comes from the first-level
# cache
_BLOCK = 1024
_CACHE_LINE = 64
_LARGEST_RISE = np.float32(
    8.0
)  # powers of two above the anchor: beyond, entropy = log l − w / l would lose digits
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_LOWEST = np.float32(-126.0)
_MINUS_INF = np.float32(-np.inf)


@njit(fastmath=_REORDER, inline="always")
def _exp2(t: np.float32) -> np.float32:
    """2^t for −126 ≤ t < 127 to 2 ulp: 2^n times a polynomial (Cephes exp2f) in the remainder, |f|
    ≤ 1/2.
    """
    n = nearest_integer(t)
    f = t - n
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    return (p * f + np.float32(1.0)) * power_of_two(np.int32(n))


# Slices and loops from 0 keep indices free of Python's negative wrap-around, which would turn loads
# into gathers.
@njit(fastmath=_REORDER, nogil=True, cache=True)
def _block_maximum(block):  # type: ignore[no-untyped-def]
    prefer_wide_vectors()
    key = np.int32(-2147483648)
    for j in range(block.size):
        key = max(key, ordered(load(block[j])))
    return from_ordered(key)


@njit(fastmath=_REORDER, nogil=True, cache=True)
def _block_sums(block, anchor, log2_scale):  # type: ignore[no-untyped-def]
    """Σ 2^t, Σ t 2^t and max t, with t = (x − anchor) · log2(e) / τ."""
    prefer_wide_vectors()
    total, weighted, key = np.float32(0.0), np.float32(0.0), np.int32(-2147483648)
    for j in range(block.size):
        t = (load(block[j]) - anchor) * log2_scale
        key = max(key, ordered(t))
        t = _LOWEST if t < _LOWEST else t  # NaN stays NaN
        p = _exp2(t)
        total += p
        weighted += p * t
    return total, weighted, from_ordered(key)


@njit(nogil=True, cache=True)
def _row_sums(bits, start, end, log2_scale):  # type: ignore[no-untyped-def]
    """(anchor, Σ 2^t, Σ t 2^t); the anchor is −inf if no logit is finite."""
    anchor, total, weighted = _MINUS_INF, np.float32(0.0), np.float32(0.0)
    for begin in range(start, end, _BLOCK):
        block = bits[begin : min(begin + _BLOCK, end)]
        # The exponentials keep the core busy for longer than it looks ahead: without this, memory
        # waits for it.
        for j in range(
            begin + _BLOCK, min(begin + 2 * _BLOCK, bits.size), _CACHE_LINE // bits.itemsize
        ):
            prefetch(bits, j)
        if anchor == _MINUS_INF:
            anchor = _block_maximum(block)
        if anchor == _MINUS_INF:
            # −inf − −inf is NaN, and NaN must mean NaN: look for it relative to 0, where the rest
            # vanishes.
            total += _block_sums(block, np.float32(0.0), log2_scale)[0] * np.float32(0.0)
            continue
        block_total, block_weighted, rise = _block_sums(block, anchor, log2_scale)
        if rise > _LARGEST_RISE:
            highest = _block_maximum(block)
            shift = (anchor - highest) * log2_scale
            scale = np.float32(2.0) ** shift
            weighted = (weighted + shift * total) * scale if scale > 0 else np.float32(0.0)
            total *= scale
            anchor = highest
            block_total, block_weighted, rise = _block_sums(block, anchor, log2_scale)
        total += block_total
        weighted += block_weighted
    return anchor, total, weighted


@njit(nogil=True, cache=True)
def partial_sums(bits, columns, targets, out, start, end, first, valid, inverse_temperature):  # type: ignore[no-untyped-def]
    """Rows [start, end): out[:, r] = anchor, Σ exp(d), Σ d exp(d), target logit (NaN if not held
    here).
    """
    for r in range(start, end):
        row = bits[r * columns : r * columns + valid]
        anchor, total, weighted = _row_sums(
            bits, r * columns, r * columns + valid, inverse_temperature * _LOG2_E
        )
        out[0, r], out[1, r], out[2, r] = anchor, total, weighted * _LN_2
        local = targets[r] - first
        out[3, r] = load(row[local]) if 0 <= local < valid else np.float32(np.nan)


@njit(fastmath=_REORDER, inline="always")
def _logit_gradient(x, anchor, log2_sum, log2_scale, flat, slope):  # type: ignore[no-untyped-def]
    t = (x - anchor) * log2_scale - log2_sum
    t = _LOWEST if t < _LOWEST else t
    return -_exp2(t) * (flat + slope * t)


@njit(fastmath=_REORDER, nogil=True, cache=True)
def _row_gradient(row, out, anchor, log2_sum, log2_scale, flat, slope):  # type: ignore[no-untyped-def]
    prefer_wide_vectors()
    for j in range(row.size):
        out[j] = store(
            _logit_gradient(load(row[j]), anchor, log2_sum, log2_scale, flat, slope), row[j]
        )


# Apart from the above because a loop over two arrays is not vectorised where they turn out to be
# the same.
@njit(fastmath=_REORDER, nogil=True, cache=True)
def _row_gradient_in_place(row, anchor, log2_sum, log2_scale, flat, slope):  # type: ignore[no-untyped-def]
    prefer_wide_vectors()
    for j in range(row.size):
        row[j] = store(
            _logit_gradient(load(row[j]), anchor, log2_sum, log2_scale, flat, slope), row[j]
        )


@njit(nogil=True, cache=True)
def gradients(  # type: ignore[no-untyped-def]
    bits, columns, targets, per_token, out, start, end, first, valid, inverse_temperature, in_place
):
    """Rows [start, end) of ∂loss/∂logits; in_place says that `out` is `bits`.

    per_token[5, T]: anchor, log-sum, entropy, ∂loss/∂logprob, ∂loss/∂entropy.
    """
    for r in range(start, end):
        row, result = bits[r * columns : (r + 1) * columns], out[r * columns : (r + 1) * columns]
        anchor, log_sum, entropy = per_token[0, r], per_token[1, r], per_token[2, r]
        grad_logprob, grad_entropy = per_token[3, r], per_token[4, r]
        local = targets[r] - first
        held = 0 <= local < valid
        target_log_p = (
            (load(row[local]) - anchor) * inverse_temperature - log_sum if held else np.float32(0.0)
        )
        zero = store(np.float32(0.0), row[0])
        flat = (grad_logprob + grad_entropy * entropy) * inverse_temperature
        slope = grad_entropy * _LN_2 * inverse_temperature
        scale, log2_sum = inverse_temperature * _LOG2_E, log_sum * _LOG2_E
        if in_place:
            _row_gradient_in_place(row[:valid], anchor, log2_sum, scale, flat, slope)
        else:
            _row_gradient(row[:valid], result[:valid], anchor, log2_sum, scale, flat, slope)
        if held:
            p = np.exp(target_log_p)
            rest = (
                np.float32(0.0)
                if p == 0
                else p * (grad_logprob + grad_entropy * (target_log_p + entropy))
            )
            result[local] = store(np.float32((grad_logprob - rest) * inverse_temperature), zero)
        for j in range(valid, columns):
            result[j] = zero
