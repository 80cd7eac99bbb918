"""Triton kernels: one pass over a row of logits in forward, one in backward."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-126.0)


@triton.jit
def _accumulate(x, maximum, total, weighted, log2_scale):
    """One block into the running sums of 2^t and t 2^t, t = (x − maximum) log2(e) / τ, kept per
    lane.
    """
    highest = tl.max(x, axis=0)
    if (
        highest > maximum
    ):  # seldom after the first blocks, so the rescaling costs nothing on average
        shift = tl.maximum((maximum - highest) * log2_scale, LOWEST)
        scale = tl.exp2(shift)
        weighted = (weighted + shift * total) * scale
        total = total * scale
        maximum = highest
    # A block without a finite logit leaves the maximum at −inf, and −inf − −inf is NaN.
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    t = (x - base) * log2_scale
    p = tl.exp2(t)
    total += p
    weighted += p * tl.maximum(t, LOWEST)
    return maximum, total, weighted


@triton.jit
def _target_logit(base, target, valid):
    """NaN for a target that is not among the row's valid columns."""
    held = (target >= 0) & (target < valid)
    return tl.where(held, tl.load(base + target, mask=held, other=0.0).to(tl.float32), float("nan"))


@triton.jit
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
    """Row program. out[4, T]: logprob, entropy, maximum, log-sum.

    PARTIAL: of one shard, the rows that `merge_shards` takes.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * columns
    log2_scale = inverse_temperature * LOG2_E
    lanes = tl.arange(0, BLOCK)
    maximum = -float("inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    weighted = tl.zeros([BLOCK], dtype=tl.float32)
    # Whole blocks are loaded without a mask: a true vocabulary is often odd, and an odd mask would
    # split the loads.
    whole = (valid // BLOCK) * BLOCK
    for begin in range(0, whole, BLOCK):
        x = tl.load(base + begin + lanes).to(tl.float32)
        maximum, total, weighted = _accumulate(x, maximum, total, weighted, log2_scale)
    if whole < valid:
        x = tl.load(base + whole + lanes, mask=whole + lanes < columns, other=-float("inf")).to(
            tl.float32
        )
        x = tl.where(whole + lanes < valid, x, -float("inf"))
        maximum, total, weighted = _accumulate(x, maximum, total, weighted, log2_scale)

    sum_exp = tl.sum(total, axis=0)
    sum_weighted = tl.sum(weighted, axis=0) * LN_2
    target_logit = _target_logit(base, tl.load(targets + row).to(tl.int64) - first, valid)
    if PARTIAL:
        tl.store(out + row, maximum)
        tl.store(out + tokens + row, sum_exp)
        tl.store(out + 2 * tokens + row, sum_weighted)
        tl.store(out + 3 * tokens + row, target_logit)
    else:
        log_sum = tl.log(sum_exp) + (maximum - maximum)  # NaN for a row without a finite logit
        tl.store(out + row, (target_logit - maximum) * inverse_temperature - log_sum)
        tl.store(out + tokens + row, log_sum - sum_weighted / sum_exp)
        tl.store(out + 2 * tokens + row, maximum)
        tl.store(out + 3 * tokens + row, log_sum)


@triton.jit
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
    x = tl.load(logits + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
    target = tl.load(targets + row).to(tl.int64) - first
    upstream = tl.load(grad_logprob + row)
    log2_p = (x - tl.load(maximum + row)) * (inverse_temperature * LOG2_E) - tl.load(
        log_sum + row
    ) * LOG2_E
    p = tl.exp2(log2_p)
    pull = upstream
    if ENTROPY_GRAD:
        pull += tl.load(grad_entropy + row) * (
            tl.maximum(log2_p, LOWEST) * LN_2 + tl.load(entropy + row)
        )
    gradient = (tl.where(column == target, upstream, 0.0) - p * pull) * inverse_temperature
    gradient = tl.where(column < valid, gradient, 0.0)
    tl.store(out + row * columns + column, gradient.to(out.dtype.element_ty), mask=inside)
