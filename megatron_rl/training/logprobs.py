"""Log-probabilities and entropies of the trained tokens, from a micro-batch's logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from espo_kernels import token_logprob_entropy
from megatron_rl.config.schema import RolloutSettings
from megatron_rl.training.micro_batches import MicroBatch

# Each chunk has a copy of its logits, and a vocabulary may have 150,000 columns.
_CHUNK_TOKENS = 4096


class ResponseLogprobs:
    """Computes log-probabilities and entropies at the sampling temperature.

    vocab_size: without padding.
    tp_group: the ranks that share the vocabulary, None if it is not split.
    cp_group: the ranks that share the sequences, None if they are not split.
    entropy_grad: True if gradients flow through the entropies, too.
    chunk_tokens: rows of the logits that are handled at a time.
    """

    def __init__(
        self,
        rollout: RolloutSettings,
        chunk_tokens: int = _CHUNK_TOKENS,
        /,  # callers unpack a dictionary of groups, whose type fits no number
        *,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
        cp_group: dist.ProcessGroup | None = None,
        entropy_grad: bool = False,
    ) -> None:
        self._temperature = rollout.temperature
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._tp_group = tp_group
        self._cp_group = cp_group
        self._entropy_grad = entropy_grad

    def __call__(
        self, logits: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logprob, entropy), float32 [T] each, in nats, of the batch's trained tokens.

        logits: [rows, V / tp].

        Ranks that share the sequences all get the values of whole sequences, which losses need, and
        back-propagate the values that they computed. NaN or +inf in the row of a trained token
        makes its two results NaN.
        """
        logprob, entropy = self._local_values(logits, batch)
        if self._cp_group is None or len(batch.advantages) == 0:
            return logprob, entropy
        local_values = torch.stack([logprob, entropy])
        logprob, entropy = WholeSequences.apply(
            local_values, batch.places, len(batch.advantages), self._cp_group
        )
        return logprob, entropy

    def _local_values(
        self, logits: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logprob, entropy) [R] of the trained tokens whose logits are on this rank."""
        if len(batch.rows) == 0:
            # Attached to the graph, because this rank takes part in the backward collectives. A
            # slice without rows needs no copy of the logits.
            empty = logits[:0].float().sum()
            return empty.expand(0), logits.new_zeros(0, dtype=torch.float32)
        chunks = _GatherRows.apply(logits, *batch.rows.split(self._chunk_tokens))
        logprobs: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        for chunk, targets in zip(chunks, batch.targets.split(self._chunk_tokens), strict=True):
            logprob, entropy = token_logprob_entropy(
                chunk,
                targets,
                temperature=self._temperature,
                vocab_size=self._vocab_size,
                tp_group=self._tp_group,
                entropy_grad=self._entropy_grad,
                inplace_backward=True,  # the chunk is a copy that nothing else reads
                check_values=False,  # an exception on one rank would leave the others waiting
            )
            logprobs.append(logprob)
            entropies.append(entropy)
        return torch.cat(logprobs), torch.cat(entropies)


class _GatherRows(torch.autograd.Function):
    """Copies distinct rows, one chunk for each index tensor.

    The gradients of all chunks fill one tensor instead of one tensor each.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, *indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*indices)
        ctx.shape = logits.shape
        return tuple(logits.index_select(0, rows) for rows in indices)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_gradient = gradients[0].new_zeros(ctx.shape)
        for rows, gradient in zip(ctx.saved_tensors, gradients, strict=True):
            logits_gradient.index_copy_(0, rows, gradient)
        return logits_gradient, *(None for _ in gradients)


class WholeSequences(torch.autograd.Function):
    """Gathers values of tokens from context-parallel ranks into whole sequences.

    [k, R] of this rank -> [k, num_tokens] of all ranks of `group`, float32.

    Each token is computed by one rank.

    places: int64 [R], the tokens that this rank computed.

    All ranks compute the same loss of whole sequences. A rank has the gradient of its own tokens.
    The sum over the ranks, which data parallelism computes, is the gradient of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local_values: torch.Tensor,
        places: torch.Tensor,
        num_tokens: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        values = local_values.new_zeros(local_values.shape[0], num_tokens)
        values[:, places] = local_values
        dist.all_reduce(values, group=group)  # exact, because the other ranks add zeros
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[:, places], None, None, None
