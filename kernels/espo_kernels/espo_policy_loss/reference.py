"""The ESPO objective in the paper's notation, differentiated by autograd.

It computes one sequence and one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from espo_kernels.espo_policy_loss.inputs import MAX_LOG_RATIO, LossInputs
from espo_kernels.espo_policy_loss.metrics import EspoMetrics, metrics_from_tokens
from espo_kernels.segments import without_infinities


def loss_reference(logprobs: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, EspoMetrics]:
    """(loss, metrics); arithmetic in float64 for float64 logprobs, else float32."""
    log_pi = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    A = without_infinities(inputs.advantages.to(log_pi.dtype))
    epsilon = without_infinities(inputs.clip.to(log_pi.dtype))
    delta = without_infinities((log_pi - inputs.old_logprobs.to(log_pi.dtype)).detach())
    K = inputs.num_groups
    tau = _group_tokens(inputs)
    sums = inputs.all_reduced(_sequence_sums(tau, delta, A, K))
    size = sums[:, K : 2 * K]
    log_s = sums[:, :K] / size.clamp_min(1)

    offset = delta if inputs.ratio_denominator == "old" else torch.zeros_like(delta)
    J, s_t, eps_t = _objective(log_pi, log_s, offset, A, epsilon, size, tau)
    # A float64 count does not widen the loss.
    loss = (-J / inputs.denominator(sums[:, 2 * K])).to(J.dtype)
    return loss, metrics_from_tokens(
        s_t, eps_t, A, inputs.group_id, epsilon, size > 0, inputs.counts_groups
    )


def _objective(
    log_pi: torch.Tensor,
    log_s: torch.Tensor,
    offset: torch.Tensor,
    A: torch.Tensor,
    epsilon: torch.Tensor,
    size: torch.Tensor,
    tau: list[list[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B · J, s_t[T], ε_t[T]). offset[T]: each token's log ratio beside its group's mean."""
    J = log_pi[:0].sum()
    s_t = torch.zeros_like(offset)
    eps_t = torch.zeros_like(offset)
    num_groups = (size > 0).sum(dim=1)
    for i, k, t in _nonempty_groups(tau):
        s = _ratio(log_s[i, k] + offset[t], log_pi[t])
        eps = epsilon[i, k]
        terms = torch.minimum(s * A[t], s.clamp(1 - eps, 1 + eps) * A[t])
        J = J + terms.sum() / size[i, k] / num_groups[i]
        s_t[t] = s.detach()
        eps_t[t] = eps
    return J, s_t, eps_t


def _group_tokens(inputs: LossInputs) -> list[list[torch.Tensor]]:
    """Token indices of each sequence's groups."""
    tau = []
    for start, end in pairwise(inputs.cu_seqlens.tolist()):
        members = inputs.group_id[start:end]
        tau.append([start + (members == k).nonzero().flatten() for k in range(inputs.num_groups)])
    return tau


def _nonempty_groups(
    tau: list[list[torch.Tensor]],
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(sequence, group, token indices) of the groups with tokens on this rank."""
    for i, groups in enumerate(tau):
        for k, t in enumerate(groups):
            if t.numel():
                yield i, k, t


def _sequence_sums(
    tau: list[list[torch.Tensor]], delta: torch.Tensor, A: torch.Tensor, K: int
) -> torch.Tensor:
    """[B, 2K + 1]: Σ log ratio by group, tokens by group, groups with an advantage."""
    sums = delta.new_zeros(len(tau), 2 * K + 1)
    for i, groups in enumerate(tau):
        for k, t in enumerate(groups):
            sums[i, k] = delta[t].sum()
            sums[i, K + k] = t.numel()
            sums[i, 2 * K] += (A[t] != 0).any()
    return sums


def _ratio(log_value: torch.Tensor, log_pi: torch.Tensor) -> torch.Tensor:
    """exp of the clamped log ratio, with a gradient through each token's own log π."""
    value = log_value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return value * torch.exp(log_pi - log_pi.detach())
