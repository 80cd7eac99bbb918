"""Triton kernels: one pass over a row of logits in forward, one in backward."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-126.0)
# A program reads one number of each, at any alignment.
_BY_TOKEN = ["targets", "maximum", "log_sum", "entropy", "grad_logprob", "grad_entropy"]


@triton.jit
def _rescale(maximum, highest, total, weighted_total, log2_scale):
    """Move a lane's sums from its maximum to a higher one.

    Returns what the lane's logits are measured from, and the sums.
    """
    # A lane without a finite logit has the maximum −inf, and −inf − −inf is NaN.
    base = tl.where(highest == -float("inf"), 0.0, highest)
    shift = tl.maximum((maximum - base) * log2_scale, LOWEST)
    scale = tl.exp2(shift)
    return base, total * scale, (weighted_total + shift * total) * scale


@triton.jit
def _accumulate(x, base, total, weighted_total, log2_scale):
    """Add a logit to each lane's sums of 2^t and t 2^t, t = (x − base) log2(e) / τ."""
    t = (x - base) * log2_scale
    p = tl.exp2(t)
    return total + p, weighted_total + p * tl.maximum(t, LOWEST)


@triton.jit
def _target_logit(base, target, valid):
    """NaN for a target that is not among the row's valid columns."""
    is_held = (target >= 0) & (target < valid)
    return tl.where(
        is_held, tl.load(base + target, mask=is_held, other=0.0).to(tl.float32), float("nan")
    )


@triton.jit
def _add_four_blocks(block, maximum, total, weighted, log2_scale, BLOCK: tl.constexpr):
    """Add four blocks to the lanes' maxima and sums. block: pointers to the first.

    Four loads are in flight, and their logits share one rescaling: 1.25 exponentials a logit.
    """
    first = tl.load(block).to(tl.float32)
    second = tl.load(block + BLOCK).to(tl.float32)
    third = tl.load(block + 2 * BLOCK).to(tl.float32)
    fourth = tl.load(block + 3 * BLOCK).to(tl.float32)
    highest = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
    highest = tl.maximum(maximum, highest)
    base, total, weighted = _rescale(maximum, highest, total, weighted, log2_scale)
    total, weighted = _accumulate(first, base, total, weighted, log2_scale)
    total, weighted = _accumulate(second, base, total, weighted, log2_scale)
    total, weighted = _accumulate(third, base, total, weighted, log2_scale)
    total, weighted = _accumulate(fourth, base, total, weighted, log2_scale)
    return highest, total, weighted


@triton.jit
def _add_rest(row, column, columns, valid, maximum, total, weighted, log2_scale):
    """Add the valid ones of a block of columns to the lanes' maxima and sums."""
    x = tl.load(row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    x = tl.where(column < valid, x, -float("inf"))
    highest = tl.maximum(maximum, x)
    base, total, weighted = _rescale(maximum, highest, total, weighted, log2_scale)
    total, weighted = _accumulate(x, base, total, weighted, log2_scale)
    return highest, total, weighted


@triton.jit
def _row_sums(row, columns, valid, inverse_temperature, BLOCK: tl.constexpr):
    """(maximum, Σ 2^t, Σ t 2^t) of a row's valid columns. row: a pointer to its first logit.

    Each lane keeps a maximum of its own, so that lanes meet once, at the end of the row.
    """
    log2_scale = inverse_temperature * LOG2_E
    lanes = tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    weighted = tl.zeros([BLOCK], dtype=tl.float32)
    # Whole blocks are loaded without a mask: a true vocabulary is often odd, and an odd mask would
    # split the loads.
    step: tl.constexpr = 4 * BLOCK
    whole = (valid // step) * step
    for begin in range(0, whole, step):
        block = row + begin + lanes
        maximum, total, weighted = _add_four_blocks(
            block, maximum, total, weighted, log2_scale, BLOCK
        )
    for begin in range(whole, valid, BLOCK):
        column = begin + lanes
        maximum, total, weighted = _add_rest(
            row, column, columns, valid, maximum, total, weighted, log2_scale
        )
    highest = tl.max(maximum, axis=0)
    _base, total, weighted = _rescale(maximum, highest, total, weighted, log2_scale)
    return highest, tl.sum(total, axis=0), tl.sum(weighted, axis=0)


@triton.jit
def _store_column(out, tokens, first, second, third, fourth):
    """Write a token's column of out[4, T]."""
    tl.store(out, first)
    tl.store(out + tokens, second)
    tl.store(out + 2 * tokens, third)
    tl.store(out + 3 * tokens, fourth)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["targets", "out"])
def logprob_entropy_kernel(
    logits,
    targets,
    out,
    tokens,
    columns,
    first,
    valid,
    inverse_temperature,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of one row. out[4, T]: logprob, entropy, maximum, log-sum.

    PARTIAL: the rows of one shard that `merge_shards` takes.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * columns
    maximum, sum_exp, sum_t_exp = _row_sums(base, columns, valid, inverse_temperature, BLOCK)
    sum_weighted = sum_t_exp * LN_2
    target = tl.load(targets + row).to(tl.int64) - first
    target_logit = _target_logit(base, target, valid)
    if PARTIAL:
        _store_column(out + row, tokens, maximum, sum_exp, sum_weighted, target_logit)
    else:
        log_sum = tl.log(sum_exp) + (maximum - maximum)  # NaN for a row without a finite logit
        logprob = (target_logit - maximum) * inverse_temperature - log_sum
        entropy = log_sum - sum_weighted / sum_exp
        _store_column(out + row, tokens, logprob, entropy, maximum, log_sum)


@triton.jit
def _log2_probability(x, maximum, log_sum, inverse_temperature):
    """log2 p of a row's logits, with pointers to the row's maximum and log-sum."""
    distance = (x - tl.load(maximum)) * (inverse_temperature * LOG2_E)
    return distance - tl.load(log_sum) * LOG2_E


@triton.jit
def _entropy_pull(log2_p, entropy, grad_entropy):
    """∂entropy (log p_v + H), with pointers to the row's entropy and its gradient."""
    return tl.load(grad_entropy) * (tl.maximum(log2_p, LOWEST) * LN_2 + tl.load(entropy))


@triton.jit(do_not_specialize_on_alignment=_BY_TOKEN)
def logits_gradient_kernel(
    logits,
    targets,
    maximum,
    log_sum,
    entropy,
    grad_logprob,
    grad_entropy,
    out,
    columns,
    first,
    valid,
    inverse_temperature,
    ENTROPY_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of one row's block.

    ∂/∂x_v = (∂logprob (1[v = target] − p_v) − ∂entropy p_v (log p_v + H)) / τ.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    target = tl.load(targets + row).to(tl.int64) - first
    upstream = tl.load(grad_logprob + row)
    log2_p = _log2_probability(x, maximum + row, log_sum + row, inverse_temperature)
    p = tl.exp2(log2_p)
    pull = upstream
    if ENTROPY_GRAD:
        pull += _entropy_pull(log2_p, entropy + row, grad_entropy + row)
    gradient = (tl.where(column == target, upstream, 0.0) - p * pull) * inverse_temperature
    gradient = tl.where(column < valid, gradient, 0.0)
    tl.store(out + at, gradient.to(out.dtype.element_ty), mask=inside)
