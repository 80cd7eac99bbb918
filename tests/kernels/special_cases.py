"""The settings under which ESPO must equal other published objectives, in float64."""

from __future__ import annotations

import torch

from espo_kernels import EspoGroups, espo_groups, espo_policy_loss
from tests.kernels.batches import ResponseBatch

Result = tuple[torch.Tensor, torch.Tensor]


def pad_tokens(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[T] -> [B, longest], zeros behind each sequence."""
    return torch.nn.utils.rnn.pad_sequence(values.split(lengths), batch_first=True)


def one_group_per_sequence(batch: ResponseBatch, lengths: list[int], clip: float) -> Result:
    """GSPO-token."""
    groups = _one_group(batch, batch.cu_seqlens, clip)
    return loss_and_gradient(batch, groups, batch.cu_seqlens, int((groups.count > 0).sum()))


def one_group_per_token(batch: ResponseBatch, lengths: list[int], clip: float) -> Result:
    """PPO-clip: every token is its own sequence.

    The weight 1/n of its true sequence is in the advantage.
    """
    alone = torch.arange(batch.loss_mask.numel() + 1)
    groups = _one_group(batch, alone, clip)
    assert groups.count.max() <= 1
    token_counts = torch.tensor([int(mask.sum()) for mask in batch.loss_mask.split(lengths)])
    weight = token_counts.clamp(min=1).double().repeat_interleave(torch.tensor(lengths))
    weighted_batch = ResponseBatch(
        **{**vars(batch), "advantages": batch.advantages / weight, "cu_seqlens": alone}
    )
    return loss_and_gradient(weighted_batch, groups, alone, int((token_counts > 0).sum()))


def loss_and_gradient(
    batch: ResponseBatch,
    groups: EspoGroups,
    cu_seqlens: torch.Tensor,
    num_sequences: int,
    backend: str = "reference",
) -> Result:
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, _ = espo_policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        cu_seqlens,
        groups,
        num_sequences=num_sequences,
        backend=backend,
    )
    loss.backward()
    return loss.detach(), logprobs.grad


def _one_group(batch: ResponseBatch, cu_seqlens: torch.Tensor, clip: float) -> EspoGroups:
    return espo_groups(
        batch.entropies,
        cu_seqlens,
        vocab_size=9,
        fractions=(),
        fixed_clip=clip,
        loss_mask=batch.loss_mask,
    )
