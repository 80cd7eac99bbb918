"""The ESPO objective in the paper's notation, one sequence and one group at a time, differentiated
by autograd.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from espo_kernels.espo_policy_loss.inputs import MAX_LOG_RATIO, LossInputs
from espo_kernels.espo_policy_loss.metrics import EspoMetrics, metrics_from_tokens
from espo_kernels.segments import without_infinities


def loss_reference(logprobs: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, EspoMetrics]:
    """(loss, metrics); arithmetic in float64 for float64 logprobs, else float32."""
    log_pi = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    A, epsilon = (
        without_infinities(tensor.to(log_pi.dtype)) for tensor in (inputs.advantages, inputs.clip)
    )
    delta = without_infinities((log_pi - inputs.old_logprobs.to(log_pi.dtype)).detach())
    group_id, K = inputs.group_id, inputs.num_groups
    offsets = inputs.cu_seqlens.tolist()
    spans = [range(start, end) for start, end in pairwise(offsets)]
    tau = [
        [i.start + (group_id[i.start : i.stop] == k).nonzero().flatten() for k in range(K)]
        for i in spans
    ]

    sums = log_pi.new_zeros(len(spans), 2 * K + 1)
    for i, groups in enumerate(tau):
        for k, t in enumerate(groups):
            sums[i, k], sums[i, K + k] = delta[t].sum(), t.numel()
            sums[i, 2 * K] += (A[t] != 0).any()
    sums = inputs.all_reduced(sums)
    size = sums[:, K : 2 * K]
    log_s = sums[:, :K] / size.clamp_min(1)

    J, s_t, eps_t = log_pi[:0].sum(), torch.zeros_like(delta), torch.zeros_like(delta)
    for i, groups in enumerate(tau):
        K_i = (size[i] > 0).sum()
        for k, t in enumerate(groups):
            if t.numel() == 0:
                continue
            log_value = log_s[i, k] + (
                delta[t] if inputs.ratio_denominator == "old" else torch.zeros_like(delta[t])
            )
            value = log_value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            s = value * torch.exp(
                log_pi[t] - log_pi[t].detach()
            )  # value s_τ, gradient through the token
            eps = epsilon[i, k]
            terms = torch.minimum(s * A[t], s.clamp(1 - eps, 1 + eps) * A[t])
            J = J + terms.sum() / size[i, k] / K_i
            s_t[t], eps_t[t] = s.detach(), eps
    loss = (-J / inputs.denominator(sums[:, 2 * K])).to(
        J.dtype
    )  # a float64 count does not widen the loss
    nonempty = size > 0
    return loss, metrics_from_tokens(
        s_t, eps_t, A, group_id, epsilon, nonempty, inputs.counts_groups
    )
