"""Triton kernels of the ESPO loss: one per sequence, one final reduction, one that scales the
gradient.

All tokens of a group share one s and one ε (unless the ratio's denominator is π_old), so whether a
token is clipped depends on its advantage's sign alone: the loss and its diagnostics follow from
sums over positive and over negative advantages, and the second pass over the tokens only writes the
gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espo_kernels.triton_segments import add_to_row, by_group, sequence_span, tile_row, to_tokens

MASKED = tl.constexpr(255)
MAX_LOG_RATIO = tl.constexpr(10.0)
# Sums of a sequence by group.
LOG_RATIO = tl.constexpr(0)
SIZE = tl.constexpr(1)
POSITIVE = tl.constexpr(2)  # Σ A over A ≥ 0
NEGATIVE = tl.constexpr(3)  # Σ A over A < 0
NUM_POSITIVE = tl.constexpr(4)
NUM_NEGATIVE = tl.constexpr(5)
PADDED_SUMS = tl.constexpr(8)
# Statistics of a sequence by group: the objective, then the fields of `EspoMetrics` in their order.
PADDED_STATISTICS = tl.constexpr(16)
NUM_STATISTICS = tl.constexpr(10)
FIRST_EXTREME = tl.constexpr(8)
# Tensors that callers may have sliced anywhere. Sequences begin anywhere as well, so that a wider
# load is never possible, and a kernel for each alignment would gain nothing.
_INPUTS = ["logprobs", "old_logprobs", "advantages", "cu_seqlens", "group_id", "loss_mask"]


@triton.jit
def _load_groups(group_id, loss_mask, begin, end, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """(token indices, group of each kept token or MASKED) of the block at `begin`."""
    token = begin + tl.arange(0, BLOCK)
    inside = token < end
    tau = tl.load(group_id + token, mask=inside, other=255).to(tl.int32)
    if MASK:
        tau = tl.where(tl.load(loss_mask + token, mask=inside, other=0) != 0, tau, MASKED)
    return token, tau


@triton.jit
def _load_finite(values, token, member):
    """float32, 0 for other tokens.

    Infinities become NaN: the clamp of the ratio and the clip would hide them.
    """
    value = tl.load(values + token, mask=member, other=0.0).to(tl.float32)
    return value + (value - value)


@triton.jit
def _load_delta(logprobs, old_logprobs, token, member):
    return _load_finite(logprobs, token, member) - _load_finite(old_logprobs, token, member)


@triton.jit
def _add_block_sums(sums, A, delta, member, tau, K: tl.constexpr, PADDED: tl.constexpr):
    sums = add_to_row(sums, LOG_RATIO, by_group(delta, tau, K, PADDED))
    sums = add_to_row(sums, SIZE, by_group(tl.where(member, 1.0, 0.0), tau, K, PADDED))
    sums = add_to_row(sums, POSITIVE, by_group(tl.where(A < 0, 0.0, A), tau, K, PADDED))
    sums = add_to_row(sums, NEGATIVE, by_group(tl.where(A < 0, A, 0.0), tau, K, PADDED))
    sums = add_to_row(sums, NUM_POSITIVE, by_group(tl.where(A > 0, 1.0, 0.0), tau, K, PADDED))
    return add_to_row(sums, NUM_NEGATIVE, by_group(tl.where(A < 0, 1.0, 0.0), tau, K, PADDED))


@triton.jit
def _sequence_sums(
    logprobs,
    old_logprobs,
    advantages,
    group_id,
    loss_mask,
    start,
    end,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """([PADDED_SUMS, PADDED] sums of one sequence, 1.0 if a token has an advantage)."""
    sums = tl.zeros([PADDED_SUMS, PADDED], dtype=tl.float32)
    strays = tl.zeros([], dtype=tl.float32)
    for begin in range(start, end, BLOCK):
        token, tau = _load_groups(group_id, loss_mask, begin, end, MASK, BLOCK)
        member = tau != MASKED
        strays += tl.sum(tl.where(member & (tau >= K), 1.0, 0.0), axis=0)
        A = _load_finite(advantages, token, member)
        delta = _load_delta(logprobs, old_logprobs, token, member)
        sums = _add_block_sums(sums, A, delta, member, tau, K, PADDED)
    if strays > 0:
        sums += float("nan")
    num_advantages = tl.sum(tile_row(sums, NUM_POSITIVE) + tile_row(sums, NUM_NEGATIVE), axis=0)
    return sums, tl.where(num_advantages > 0, 1.0, 0.0)


@triton.jit
def _ratio(log_s, eps):
    """exp of the clamped log ratio; eps − eps is 0, or NaN if ε is."""
    log_s = tl.where(log_s > MAX_LOG_RATIO, MAX_LOG_RATIO, log_s)
    log_s = tl.where(log_s < -MAX_LOG_RATIO, -MAX_LOG_RATIO, log_s)
    return tl.exp(log_s) + (eps - eps)


@triton.jit
def _means(log_ratio, size):
    """By group: mean log ratio, 1 if non-empty, 1 / (|τ| K_i)."""
    nonempty = tl.where(size > 0, 1.0, 0.0)
    tokens = tl.maximum(size, 1.0)
    return log_ratio / tokens, nonempty, 1.0 / (tokens * tl.maximum(tl.sum(nonempty, axis=0), 1.0))


@triton.jit
def _token_gradient(s, eps, A, weighted_advantage, tau):
    """B · ∂loss/∂logprob; 0 for clipped and masked tokens.

    weighted_advantage: A times the token's weight."""
    is_clipped = ((A < 0) & (s < 1.0 - eps)) | ((A > 0) & (s > 1.0 + eps))
    return tl.where(is_clipped | (tau == MASKED), 0.0, -s * weighted_advantage)


@triton.jit
def _shared_ratio_statistics(sums, s, eps, weight, PADDED: tl.constexpr):
    """[PADDED_STATISTICS, PADDED] without the group rows, when all tokens of a group share s."""
    size = tile_row(sums, SIZE)
    high = s > 1.0 + eps
    low = s < 1.0 - eps
    positive = tile_row(sums, POSITIVE) * tl.where(high, 1.0 + eps, s)
    negative = tile_row(sums, NEGATIVE) * tl.where(low, 1.0 - eps, s)
    statistics = tl.zeros([PADDED_STATISTICS, PADDED], dtype=tl.float32)
    statistics = add_to_row(statistics, 0, tl.where(size > 0, (positive + negative) * weight, size))
    statistics = add_to_row(statistics, 1, size)
    statistics = add_to_row(statistics, 2, tl.where(low, tile_row(sums, NUM_NEGATIVE), 0.0))
    statistics = add_to_row(statistics, 3, tl.where(high, tile_row(sums, NUM_POSITIVE), 0.0))
    statistics = add_to_row(statistics, 4, size * s)
    statistics = add_to_row(statistics, 5, size * s * s)
    statistics = add_to_row(statistics, 8, tl.where(size > 0, s, float("inf")))
    return add_to_row(statistics, 9, tl.where(size > 0, s, -float("inf")))


@triton.jit
def _no_statistics(PADDED: tl.constexpr):
    """The statistics of no tokens, to be added to."""
    row = tl.arange(0, PADDED_STATISTICS)[:, None]
    empty = tl.where(row == 8, float("inf"), tl.where(row == 9, -float("inf"), 0.0))
    return tl.zeros([PADDED_STATISTICS, PADDED], dtype=tl.float32) + empty


@triton.jit
def _add_token_statistics(
    statistics, s, eps, weighted_advantage, A, tau, K: tl.constexpr, PADDED: tl.constexpr
):
    """Add a block whose tokens have different ratios.

    weighted_advantage: A times the token's weight."""
    low = (A < 0) & (s < 1.0 - eps)
    high = (A > 0) & (s > 1.0 + eps)
    value = tl.where(low, 1.0 - eps, tl.where(high, 1.0 + eps, s))
    statistics = add_to_row(statistics, 0, by_group(value * weighted_advantage, tau, K, PADDED))
    statistics = add_to_row(
        statistics, 1, by_group(tl.full(tau.shape, 1.0, tl.float32), tau, K, PADDED)
    )
    statistics = add_to_row(statistics, 2, by_group(tl.where(low, 1.0, 0.0), tau, K, PADDED))
    statistics = add_to_row(statistics, 3, by_group(tl.where(high, 1.0, 0.0), tau, K, PADDED))
    statistics = add_to_row(statistics, 4, by_group(s, tau, K, PADDED))
    statistics = add_to_row(statistics, 5, by_group(s * s, tau, K, PADDED))
    return _add_extremes(statistics, s, tau, K, PADDED)


@triton.jit
def _add_extremes(statistics, s, tau, K: tl.constexpr, PADDED: tl.constexpr):
    row = tl.arange(0, PADDED_STATISTICS)[:, None]
    group = tl.arange(0, PADDED)[None, :]
    for k in tl.static_range(K):
        smallest = tl.min(tl.where(tau == k, s, float("inf")), axis=0)
        largest = tl.max(tl.where(tau == k, s, -float("inf")), axis=0)
        statistics = tl.where(
            (row == 8) & (group == k), tl.minimum(statistics, smallest), statistics
        )
        statistics = tl.where(
            (row == 9) & (group == k), tl.maximum(statistics, largest), statistics
        )
    return statistics


@triton.jit(do_not_specialize=["tokens", "num_sequences"], do_not_specialize_on_alignment=_INPUTS)
def espo_group_sums_kernel(
    logprobs,
    old_logprobs,
    advantages,
    cu_seqlens,
    group_id,
    loss_mask,
    partial,
    tokens,
    num_sequences,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sequence program.

    partial[B, 2K + 1]: Σ log ratio by group, tokens by group, 1.0 if a token has an advantage.
    """
    sequence = tl.program_id(0)
    start, _end, keep_end, valid = sequence_span(cu_seqlens, sequence, num_sequences, tokens)
    sums, has_advantage = _sequence_sums(
        logprobs,
        old_logprobs,
        advantages,
        group_id,
        loss_mask,
        start,
        keep_end,
        K,
        PADDED,
        MASK,
        BLOCK,
    )
    group = tl.arange(0, PADDED)
    row = partial + sequence * (2 * K + 1)
    tl.store(row + group, tl.where(valid, tile_row(sums, LOG_RATIO), float("nan")), mask=group < K)
    tl.store(row + K + group, tile_row(sums, SIZE), mask=group < K)
    tl.store(row + 2 * K, has_advantage)


@triton.jit
def _load_row(row, K: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] float32 of K numbers, one for each group; 0 behind them."""
    group = tl.arange(0, PADDED)
    return tl.load(row + group, mask=group < K, other=0.0).to(tl.float32)


@triton.jit
def _load_shared(row, K: tl.constexpr, PADDED: tl.constexpr):
    """A sequence's sums over all ranks: log ratios by group, sizes by group, 1.0 if a token has an
    advantage.
    """
    has_advantage = tl.where(tl.load(row + 2 * K) > 0, 1.0, 0.0)
    return _load_row(row, K, PADDED), _load_row(row + K, K, PADDED), has_advantage


@triton.jit
def _store_statistics(
    out, statistics, nonempty, epsilon, valid, num_sequences, K: tl.constexpr, PADDED: tl.constexpr
):
    """Write [statistic, group] of one sequence with its group rows, sequences innermost.

    NaN unless valid.
    """
    statistics = add_to_row(statistics, 6, nonempty)
    statistics = add_to_row(statistics, 7, nonempty * epsilon)
    statistics = tl.where(valid, statistics, float("nan"))
    group = tl.arange(0, PADDED)
    row = tl.arange(0, PADDED_STATISTICS)[:, None]
    at = (row * K + group[None, :]) * num_sequences
    tl.store(out + at, statistics, mask=(row < NUM_STATISTICS) & (group[None, :] < K))


@triton.jit
def _token_terms(
    logprobs,
    old_logprobs,
    advantages,
    token,
    tau,
    log_s,
    epsilon,
    weight,
    OLD_DENOMINATOR: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
):
    """(A, s, ε, A times the token's weight) of a block."""
    A = _load_finite(advantages, token, tau != MASKED)
    log_value = to_tokens(log_s, tau, K, PADDED)
    if OLD_DENOMINATOR:
        log_value += _load_delta(logprobs, old_logprobs, token, tau != MASKED)
    eps = to_tokens(epsilon, tau, K, PADDED)
    s = _ratio(log_value, eps)
    return A, s, eps, A * to_tokens(weight, tau, K, PADDED)


@triton.jit
def _group_terms(
    sums,
    has_advantage,
    partial_row,
    clip_row,
    OLD_DENOMINATOR: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
):
    """(mean log ratio, ε, 1 if non-empty, token weight) by group; first statistics; has_advantage.

    SHARED: `partial_row` holds the sums over ranks that replace this rank's.
    """
    log_ratio = tile_row(sums, LOG_RATIO)
    size = tile_row(sums, SIZE)
    if SHARED:
        log_ratio, size, has_advantage = _load_shared(partial_row, K, PADDED)
    epsilon = _load_row(clip_row, K, PADDED)
    log_s, nonempty, weight = _means(log_ratio, size)
    statistics = _shared_ratio_statistics(sums, _ratio(log_s, epsilon), epsilon, weight, PADDED)
    if OLD_DENOMINATOR:
        statistics = _no_statistics(PADDED)
    return log_s, epsilon, nonempty, weight, statistics, has_advantage


@triton.jit
def _write_gradient(
    logprobs,
    old_logprobs,
    advantages,
    group_id,
    loss_mask,
    gradient,
    start,
    end,
    keep_end,
    log_s,
    epsilon,
    weight,
    statistics,
    OLD_DENOMINATOR: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of a sequence; with OLD_DENOMINATOR, add its tokens to the statistics.

    Tokens from keep_end on belong to no group.
    """
    for begin in range(start, end, BLOCK):
        token, tau = _load_groups(group_id, loss_mask, begin, keep_end, MASK, BLOCK)
        A, s, eps, weighted_advantage = _token_terms(
            logprobs,
            old_logprobs,
            advantages,
            token,
            tau,
            log_s,
            epsilon,
            weight,
            OLD_DENOMINATOR,
            K,
            PADDED,
        )
        value = _token_gradient(s, eps, A, weighted_advantage, tau)
        tl.store(gradient + token, value, mask=token < end)
        if OLD_DENOMINATOR:
            statistics = _add_token_statistics(
                statistics, s, eps, weighted_advantage, A, tau, K, PADDED
            )
    return statistics


@triton.jit(
    do_not_specialize=["tokens", "num_sequences"],
    do_not_specialize_on_alignment=[*_INPUTS, "clip", "partial"],
)
def espo_sequence_kernel(
    logprobs,
    old_logprobs,
    advantages,
    cu_seqlens,
    group_id,
    loss_mask,
    clip,
    partial,
    gradient,
    statistics_out,
    has_advantage_out,
    tokens,
    num_sequences,
    OLD_DENOMINATOR: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of one sequence: B · ∂loss/∂logprob of its tokens, and statistics.

    SHARED: `partial` holds the sequence's sums over ranks.
    """
    sequence = tl.program_id(0)
    start, end, keep_end, valid = sequence_span(cu_seqlens, sequence, num_sequences, tokens)
    sums, has_advantage = _sequence_sums(
        logprobs,
        old_logprobs,
        advantages,
        group_id,
        loss_mask,
        start,
        keep_end,
        K,
        PADDED,
        MASK,
        BLOCK,
    )
    partial_row = partial + sequence * (2 * K + 1)
    clip_row = clip + sequence * K
    log_s, epsilon, nonempty, weight, statistics, has_advantage = _group_terms(
        sums, has_advantage, partial_row, clip_row, OLD_DENOMINATOR, SHARED, K, PADDED
    )
    statistics = _write_gradient(
        logprobs,
        old_logprobs,
        advantages,
        group_id,
        loss_mask,
        gradient,
        start,
        end,
        keep_end,
        log_s,
        epsilon,
        weight,
        statistics,
        OLD_DENOMINATOR,
        K,
        PADDED,
        MASK,
        BLOCK,
    )
    _store_statistics(
        statistics_out + sequence, statistics, nonempty, epsilon, valid, num_sequences, K, PADDED
    )
    tl.store(has_advantage_out + sequence, has_advantage)


@triton.jit
def _denominator(count, denominator_tensor, denominator_value, DENOMINATOR: tl.constexpr):
    """B, NaN for a tensor that is not positive and finite."""
    B = tl.maximum(count, 1.0)
    if DENOMINATOR == "value":
        B = tl.full([], 1.0, dtype=tl.float64) * denominator_value
    if DENOMINATOR == "tensor":
        B = tl.load(denominator_tensor).to(tl.float64)
        B = tl.where(B > 0, B, float("nan")) + (B - B)
    return B


@triton.jit
def _count_sequences(has_advantage, num_sequences, BLOCK: tl.constexpr):
    """The number of sequences in which a token has an advantage, float64."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([], dtype=tl.float64)
    for begin in range(0, num_sequences, BLOCK):
        inside = begin + lane < num_sequences
        count += tl.sum(
            tl.load(has_advantage + begin + lane, mask=inside, other=0.0).to(tl.float64), axis=0
        )
    return count


@triton.jit
def _reduce_statistic(
    statistics, num_sequences, row: tl.constexpr, k, K: tl.constexpr, BLOCK: tl.constexpr
):
    """([BLOCK] sums, [BLOCK] minima) of one statistic; of the last extreme, minima of −x."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
    for begin in range(0, num_sequences, BLOCK):
        inside = begin + lane < num_sequences
        at = statistics + (row * K + k) * num_sequences + begin + lane
        values = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        total += values
        sign = -1.0 if row == FIRST_EXTREME + 1 else 1.0
        smallest = tl.minimum(smallest, tl.where(inside, values * sign, float("inf")))
    return total, smallest


@triton.jit
def _metric(total, smallest, group_share, row: tl.constexpr):
    """A metric of the batch from a statistic's sums and minima."""
    if row == FIRST_EXTREME:
        value = tl.min(smallest, axis=0)
    elif row > FIRST_EXTREME:
        value = -tl.min(smallest, axis=0)
    elif row >= 6:
        value = tl.sum(total, axis=0) * group_share
    else:
        value = tl.sum(total, axis=0)
    return value


@triton.jit(
    do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=["denominator_tensor"]
)
def espo_reduction_kernel(
    statistics,
    has_advantage,
    denominator_tensor,
    denominator_value,
    loss,
    inverse_B,
    metrics,
    num_sequences,
    group_share,
    DENOMINATOR: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: loss, 1/B and metrics[9, K] of the batch.

    DENOMINATOR: B is a "value", a "tensor", or "counted" here.
    """
    objective = tl.zeros([], dtype=tl.float64)
    count = _count_sequences(has_advantage, num_sequences, BLOCK)
    for row in tl.static_range(NUM_STATISTICS):
        for k in tl.static_range(K):
            total, smallest = _reduce_statistic(statistics, num_sequences, row, k, K, BLOCK)
            if row == 0:
                objective += tl.sum(total, axis=0)
            else:
                value = _metric(total, smallest, group_share, row)
                tl.store(metrics + (row - 1) * K + k, value)
    B = _denominator(count, denominator_tensor, denominator_value, DENOMINATOR)
    tl.store(loss, (-objective / B).to(tl.float32))
    tl.store(inverse_B, (1.0 / B).to(tl.float32))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["grad_loss", "inverse_B"])
def scale_gradient_kernel(gradient, grad_loss, inverse_B, out, tokens, BLOCK: tl.constexpr):
    """out[T] = gradient · grad_loss / B."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(grad_loss).to(tl.float32) * tl.load(inverse_B)
    values = tl.load(gradient + token, mask=token < tokens, other=0.0) * factor
    tl.store(out + token, values.to(out.dtype.element_ty), mask=token < tokens)
