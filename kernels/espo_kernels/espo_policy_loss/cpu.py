"""The ESPO loss for all sequences at once, with its gradient written out.

Invariant: the gradient of token t is −s_t A_t / (B K_i |τ|) where the clip is inactive and 0 where it is active; group
sums accumulate in float64, in token order.
"""

from __future__ import annotations

import torch

from espo_kernels.espo_policy_loss.inputs import MAX_LOG_RATIO, LossInputs
from espo_kernels.espo_policy_loss.metrics import EspoMetrics, metrics_from_tokens
from espo_kernels.segments import MASKED, segment_sums, sequence_ids


def loss_cpu(
    logprobs: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, EspoMetrics]:
    """(loss, B · ∂loss/∂logprobs [T] float32, 1/B, metrics) for CPU tensors."""
    K, num_sequences = inputs.num_groups, inputs.clip.shape[0]
    group_id = inputs.members()
    kept = (group_id != MASKED).nonzero().flatten()
    sequences = sequence_ids(inputs.cu_seqlens, logprobs.numel())[kept]
    segments = sequences * K + group_id[kept].long()
    delta = logprobs[kept].double() - inputs.old_logprobs[kept].double()
    A, clip = inputs.advantages[kept].double(), inputs.clip.double()

    sums = torch.empty(num_sequences, 2 * K + 1, dtype=torch.float64)
    sums[:, :K] = segment_sums(delta, segments, num_sequences * K).view(num_sequences, K)
    sums[:, K : 2 * K] = torch.bincount(segments, minlength=num_sequences * K).view(num_sequences, K)
    sums[:, 2 * K] = segment_sums(A != 0, sequences, num_sequences)
    sums = inputs.all_reduced(sums)
    size = sums[:, K : 2 * K]
    log_s = (sums[:, :K] / size.clamp_min(1)).flatten()[segments]
    if inputs.ratio_denominator == "old":
        log_s = log_s + delta
    s = log_s.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    eps = clip.flatten()[segments]

    nonempty = size > 0
    weight = (1 / (size * nonempty.sum(1, keepdim=True))).flatten()[segments]
    inverse_B = torch.as_tensor(1 / inputs.denominator(sums[:, 2 * K]))
    loss = -inverse_B * (torch.minimum(s * A, s.clamp(1 - eps, 1 + eps) * A) * weight).sum()
    clipped = ((A > 0) & (s > 1 + eps)) | ((A < 0) & (s < 1 - eps))
    gradient = torch.zeros(logprobs.numel(), dtype=torch.float32)
    gradient[kept] = torch.where(clipped, 0.0, -s * A * weight).float()
    metrics = metrics_from_tokens(s, eps, A, group_id[kept], clip, nonempty, inputs.counts_groups)
    return loss.float(), gradient, inverse_B, metrics


def scale_cpu(
    gradient: torch.Tensor, grad_loss: torch.Tensor, inverse_B: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """gradient · grad_loss / B in `dtype`."""
    return (gradient * (grad_loss * inverse_B)).to(dtype)
