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
def sequence_sums(logprobs, old_logprobs, advantages, cu_seqlens, group_id, sums):  # type: ignore[no-untyped-def]
    """sums[B, 2K + 1] += Σ log ratio by group, tokens by group, whether a token has an advantage."""
    K = sums.shape[1] // 2
    for i in range(sums.shape[0]):
        for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
            tau = group_id[t]
            if tau == MASKED:
                continue
            delta = np.float64(logprobs[t]) - np.float64(old_logprobs[t])
            sums[i, tau] += delta + (
                delta - delta
            )  # infinities become NaN, or the clamp of the ratio would hide them
            sums[i, K + tau] += 1
            if advantages[t] != 0:
                sums[i, 2 * K] = 1


@njit(nogil=True, cache=True)
def _ratio(log_s, eps):  # type: ignore[no-untyped-def]
    """exp of the clamped log ratio, NaN if it is or ε is not finite."""
    if log_s > MAX_LOG_RATIO:
        log_s = MAX_LOG_RATIO
    elif log_s < -MAX_LOG_RATIO:
        log_s = -MAX_LOG_RATIO
    return math.exp(log_s) + (eps - eps)


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
    s_of, weight_of = np.empty(K), np.empty(K)
    for i in range(num_sequences):
        nonempty = 0
        for tau in range(K):
            if sums[i, K + tau] > 0:
                nonempty += 1
                statistics[GROUPS, tau] += 1
                statistics[EPSILON_SUM, tau] += clip[i, tau]
        for tau in range(K):
            if sums[i, K + tau] > 0:
                s_of[tau] = _ratio(sums[i, tau] / sums[i, K + tau], clip[i, tau])
                weight_of[tau] = 1 / (sums[i, K + tau] * nonempty)
        for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
            tau = group_id[t]
            if tau == MASKED:
                continue
            s, eps, A = s_of[tau], clip[i, tau], np.float64(advantages[t])
            A += A - A
            if old_denominator:
                log_s = (
                    sums[i, tau] / sums[i, K + tau]
                    + np.float64(logprobs[t])
                    - np.float64(old_logprobs[t])
                )
                s = _ratio(log_s, eps)
            value, slope = s, s
            if A > 0 and s > 1 + eps:
                value, slope = 1 + eps, 0.0
                statistics[CLIPPED_HIGH, tau] += 1
            elif A < 0 and s < 1 - eps:
                value, slope = 1 - eps, 0.0
                statistics[CLIPPED_LOW, tau] += 1
            objective += value * A * weight_of[tau]
            gradient[t] = -slope * A * weight_of[tau]
            statistics[TOKENS, tau] += 1
            statistics[RATIO_SUM, tau] += s
            statistics[RATIO_SQUARE_SUM, tau] += s * s
            statistics[RATIO_MIN, tau] = min(statistics[RATIO_MIN, tau], s)
            statistics[RATIO_MAX, tau] = max(statistics[RATIO_MAX, tau], s)
    return objective
