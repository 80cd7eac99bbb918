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
    power_of_two,
    prefer_wide_vectors,
    prefetch,
    store,
    to_ordered,
)

_REORDER = {"reassoc", "contract", "nsz", "arcp"}
# Logits between two checks of the anchor. A block that is summed again comes from the first-level
# cache.
_BLOCK = 1024
_CACHE_LINE = 64
# Powers of two above the anchor. Beyond it, entropy = log l − w / l would lose digits.
_LARGEST_RISE = np.float32(8.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_LOWEST = np.float32(-126.0)
_MINUS_INF = np.float32(-np.inf)


@njit(fastmath=_REORDER, inline="always")
def _exp2(t: np.float32) -> np.float32:
    """2^t for −126 ≤ t < 127 to 2 ulp.

    2^n times a polynomial (Cephes exp2f) in the remainder, |f| ≤ 1/2.
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
        key = max(key, to_ordered(load(block[j])))
    return from_ordered(key)


@njit(fastmath=_REORDER, nogil=True, cache=True)
def _block_sums(block, anchor, log2_scale):  # type: ignore[no-untyped-def]
    """Σ 2^t, Σ t 2^t and max t, with t = (x − anchor) · log2(e) / τ."""
    prefer_wide_vectors()
    total = np.float32(0.0)
    weighted_total = np.float32(0.0)
    key = np.int32(-2147483648)
    for j in range(block.size):
        t = (load(block[j]) - anchor) * log2_scale
        key = max(key, to_ordered(t))
        t = _LOWEST if t < _LOWEST else t  # NaN stays NaN
        p = _exp2(t)
        total += p
        weighted_total += p * t
    return total, weighted_total, from_ordered(key)


@njit(nogil=True, cache=True)
def _prefetch_block(bits, begin):  # type: ignore[no-untyped-def]
    """Prefetch the block that begins at `begin`."""
    for j in range(begin, min(begin + _BLOCK, bits.size), _CACHE_LINE // bits.itemsize):
        prefetch(bits, j)


@njit(nogil=True, cache=True)
def _row_sums(bits, start, end, log2_scale):  # type: ignore[no-untyped-def]
    """(anchor, Σ 2^t, Σ t 2^t); the anchor is −inf if no logit is finite."""
    anchor = _MINUS_INF
    total = np.float32(0.0)
    weighted_total = np.float32(0.0)
    for begin in range(start, end, _BLOCK):
        block = bits[begin : min(begin + _BLOCK, end)]
        # The exponentials keep the core busy for longer than it looks ahead: without this, memory
        # waits for it.
        _prefetch_block(bits, begin + _BLOCK)
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
            weighted_total = (
                (weighted_total + shift * total) * scale if scale > 0 else np.float32(0.0)
            )
            total *= scale
            anchor = highest
            block_total, block_weighted, rise = _block_sums(block, anchor, log2_scale)
        total += block_total
        weighted_total += block_weighted
    return anchor, total, weighted_total


@njit(nogil=True, cache=True)
def partial_sums(  # type: ignore[no-untyped-def]
    bits, columns, targets, out, start, end, first, valid, inverse_temperature
):
    """Rows [start, end): out[:, r] = anchor, Σ exp(d), Σ d exp(d), target logit.

    The target logit is NaN if another rank holds it.
    """
    for r in range(start, end):
        row = bits[r * columns : r * columns + valid]
        anchor, total, weighted_total = _row_sums(
            bits, r * columns, r * columns + valid, inverse_temperature * _LOG2_E
        )
        out[0, r] = anchor
        out[1, r] = total
        out[2, r] = weighted_total * _LN_2
        local = targets[r] - first
        out[3, r] = load(row[local]) if 0 <= local < valid else np.float32(np.nan)


@njit(fastmath=_REORDER, inline="always")
def _logit_gradient(x, anchor, log2_sum, log2_scale, flat, slope):  # type: ignore[no-untyped-def]
    t = (x - anchor) * log2_scale - log2_sum
    t = _LOWEST if t < _LOWEST else t
    return -_exp2(t) * (flat + slope * t)


@njit(fastmath=_REORDER, nogil=True, cache=True)
def _row_gradient(  # type: ignore[no-untyped-def]
    row, out, anchor, log2_sum, log2_scale, flat, slope
):
    prefer_wide_vectors()
    for j in range(row.size):
        out[j] = store(
            _logit_gradient(load(row[j]), anchor, log2_sum, log2_scale, flat, slope), row[j]
        )


# A function of its own, because a loop over two arrays is not vectorised if they turn out to be the
# same.
@njit(fastmath=_REORDER, nogil=True, cache=True)
def _row_gradient_in_place(  # type: ignore[no-untyped-def]
    row, anchor, log2_sum, log2_scale, flat, slope
):
    prefer_wide_vectors()
    for j in range(row.size):
        row[j] = store(
            _logit_gradient(load(row[j]), anchor, log2_sum, log2_scale, flat, slope), row[j]
        )


@njit(nogil=True, cache=True)
def _target_gradient(  # type: ignore[no-untyped-def]
    logit, anchor, log_sum, entropy, grad_logprob, grad_entropy, inverse_temperature
):
    """∂loss/∂x of the target's logit."""
    log_p = (logit - anchor) * inverse_temperature - log_sum
    p = np.exp(log_p)
    rest = np.float32(0.0) if p == 0 else p * (grad_logprob + grad_entropy * (log_p + entropy))
    return np.float32((grad_logprob - rest) * inverse_temperature)


@njit(nogil=True, cache=True)
def _gradient_of_row(  # type: ignore[no-untyped-def]
    row, result, local, valid, per_token, inverse_temperature, in_place
):
    """One row of ∂loss/∂logits. local: the target's column, outside [0, valid) on other ranks."""
    anchor = per_token[0]
    log_sum = per_token[1]
    entropy = per_token[2]
    grad_logprob = per_token[3]
    grad_entropy = per_token[4]
    zero = store(np.float32(0.0), row[0])
    has_target = 0 <= local < valid
    gradient = np.float32(0.0)
    if has_target:
        # Computed before the row is overwritten.
        gradient = _target_gradient(
            load(row[local]),
            anchor,
            log_sum,
            entropy,
            grad_logprob,
            grad_entropy,
            inverse_temperature,
        )
    flat = (grad_logprob + grad_entropy * entropy) * inverse_temperature
    slope = grad_entropy * _LN_2 * inverse_temperature
    scale = inverse_temperature * _LOG2_E
    log2_sum = log_sum * _LOG2_E
    if in_place:
        _row_gradient_in_place(row[:valid], anchor, log2_sum, scale, flat, slope)
    else:
        _row_gradient(row[:valid], result[:valid], anchor, log2_sum, scale, flat, slope)
    if has_target:
        result[local] = store(gradient, zero)
    result[valid:] = zero


@njit(nogil=True, cache=True)
def gradients(  # type: ignore[no-untyped-def]
    bits, columns, targets, per_token, out, start, end, first, valid, inverse_temperature, in_place
):
    """Rows [start, end) of ∂loss/∂logits. in_place: True if `out` is `bits`.

    per_token[5, T]: anchor, log-sum, entropy, ∂loss/∂logprob, ∂loss/∂entropy.
    """
    for r in range(start, end):
        span = slice(r * columns, (r + 1) * columns)
        _gradient_of_row(
            bits[span],
            out[span],
            targets[r] - first,
            valid,
            per_token[:, r],
            inverse_temperature,
            in_place,
        )
