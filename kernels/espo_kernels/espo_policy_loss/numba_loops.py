"""The ESPO loss as compiled loops over tokens, in float64."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from espo_kernels.espo_policy_loss.inputs import MAX_LOG_RATIO
from espo_kernels.segments import MASKED

# Rows of `statistics`, in the order of `EspoMetrics`.
(
    TOKENS,
    CLIPPED_LOW,
    CLIPPED_HIGH,
    RATIO_SUM,
    RATIO_SQUARE_SUM,
    GROUPS,
    EPSILON_SUM,
    RATIO_MIN,
    RATIO_MAX,
) = range(9)


@njit(nogil=True, cache=True)
def sequence_sums(  # type: ignore[no-untyped-def]
    logprobs, old_logprobs, advantages, cu_seqlens, group_id, sums
):
    """sums[B, 2K + 1] += Σ log ratio by group, tokens by group, 1 if a token has an advantage."""
    K = sums.shape[1] // 2
    for i in range(sums.shape[0]):
        for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
            tau = group_id[t]
            if tau == MASKED:
                continue
            delta = np.float64(logprobs[t]) - np.float64(old_logprobs[t])
            # Infinities become NaN, or the clamp of the ratio would hide them.
            sums[i, tau] += delta + (delta - delta)
            sums[i, K + tau] += 1
            if advantages[t] != 0:
                sums[i, 2 * K] = 1


@njit(nogil=True, cache=True)
def _ratio(log_s, eps):  # type: ignore[no-untyped-def]
    """exp of the clamped log ratio; NaN if the log ratio is NaN or ε is not finite."""
    if log_s > MAX_LOG_RATIO:
        log_s = MAX_LOG_RATIO
    elif log_s < -MAX_LOG_RATIO:
        log_s = -MAX_LOG_RATIO
    return math.exp(log_s) + (eps - eps)


@njit(nogil=True, cache=True)
def _token_ratio(mean_delta, logprob, old_logprob, eps):  # type: ignore[no-untyped-def]
    """s_t with the denominator π_old."""
    return _ratio(mean_delta + np.float64(logprob) - np.float64(old_logprob), eps)


@njit(nogil=True, cache=True)
def _clip(s, eps, A):  # type: ignore[no-untyped-def]
    """(value in the objective, slope of the gradient, row of `statistics` or -1)."""
    if A > 0 and s > 1 + eps:
        return 1 + eps, 0.0, CLIPPED_HIGH
    if A < 0 and s < 1 - eps:
        return 1 - eps, 0.0, CLIPPED_LOW
    return s, s, -1


@njit(nogil=True, cache=True)
def _finite(value):  # type: ignore[no-untyped-def]
    """float64, NaN for infinities."""
    value = np.float64(value)
    return value + (value - value)


@njit(nogil=True, cache=True)
def _group_terms(  # type: ignore[no-untyped-def]
    sums, clip, statistics, mean_delta, s_of, weight_of
):
    """Fill mean_delta[K], s_of[K] and weight_of[K] of a sequence, and count its groups.

    sums[2K + 1], clip[K]: of the sequence.
    """
    K = clip.size
    nonempty = 0
    for tau in range(K):
        if sums[K + tau] > 0:
            nonempty += 1
            statistics[GROUPS, tau] += 1
            statistics[EPSILON_SUM, tau] += clip[tau]
    for tau in range(K):
        if sums[K + tau] > 0:
            mean_delta[tau] = sums[tau] / sums[K + tau]
            s_of[tau] = _ratio(mean_delta[tau], clip[tau])
            weight_of[tau] = 1 / (sums[K + tau] * nonempty)


@njit(nogil=True, cache=True)
def _count_token(statistics, tau, s):  # type: ignore[no-untyped-def]
    statistics[TOKENS, tau] += 1
    statistics[RATIO_SUM, tau] += s
    statistics[RATIO_SQUARE_SUM, tau] += s * s
    statistics[RATIO_MIN, tau] = min(statistics[RATIO_MIN, tau], s)
    statistics[RATIO_MAX, tau] = max(statistics[RATIO_MAX, tau], s)


@njit(nogil=True, cache=True)
def _add_sequence(  # type: ignore[no-untyped-def]
    objective, tokens, s_of, weight_of, mean_delta, clip, old_denominator, gradient, statistics
):
    """Add the terms of one sequence to the objective, and fill its gradient and statistics.

    tokens: logprobs, old_logprobs, advantages and group_id of the sequence.
    """
    logprobs, old_logprobs, advantages, group_id = tokens
    for t in range(group_id.size):
        tau = group_id[t]
        if tau == MASKED:
            continue
        s = s_of[tau]
        eps = clip[tau]
        A = _finite(advantages[t])
        if old_denominator:
            s = _token_ratio(mean_delta[tau], logprobs[t], old_logprobs[t], eps)
        value, slope, clip_row = _clip(s, eps, A)
        if clip_row >= 0:
            statistics[clip_row, tau] += 1
        objective += value * A * weight_of[tau]
        gradient[t] = -slope * A * weight_of[tau]
        _count_token(statistics, tau, s)
    return objective


@njit(nogil=True, cache=True)
def token_terms(  # type: ignore[no-untyped-def]
    logprobs,
    old_logprobs,
    advantages,
    cu_seqlens,
    group_id,
    clip,
    sums,
    old_denominator,
    gradient,
    statistics,
):
    """Σ of the objective's terms before 1/B.

    Fills gradient[T] (B · ∂loss/∂logprob) and statistics[9, K].
    """
    num_sequences, K = clip.shape
    statistics[RATIO_MIN, :] = np.inf
    statistics[RATIO_MAX, :] = -np.inf
    objective = 0.0
    s_of = np.empty(K)
    weight_of = np.empty(K)
    mean_delta = np.empty(K)
    for i in range(num_sequences):
        _group_terms(sums[i], clip[i], statistics, mean_delta, s_of, weight_of)
        span = slice(cu_seqlens[i], cu_seqlens[i + 1])
        tokens = (logprobs[span], old_logprobs[span], advantages[span], group_id[span])
        objective = _add_sequence(
            objective,
            tokens,
            s_of,
            weight_of,
            mean_delta,
            clip[i],
            old_denominator,
            gradient[span],
            statistics,
        )
    return objective
