"""Log-probabilities and entropies of the trained tokens, from a micro-batch's logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from espo_kernels import token_logprob_entropy
from megatron_rl.config.schema import RolloutSettings, TrainSettings
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.whole_sequences import WholeSequences


class ResponseLogprobs:
    """The sampling temperature divides the logits, which are handled train.logit_chunk_tokens rows
    at a time.

    vocab_size: true, without padding. tp_group: over which the vocabulary is sharded, None when it
    is not. cp_group: over which sequences are shared, None when they are not.
    """

    def __init__(
        self,
        train: TrainSettings,
        rollout: RolloutSettings,
        *,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
        cp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._temperature = rollout.temperature
        self._vocab_size = vocab_size
        self._chunk_tokens = train.logit_chunk_tokens
        self._tp_group = tp_group
        self._cp_group = cp_group

    def __call__(
        self, logits: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [rows, V / tp] -> (logprob, entropy) float32 [T] in nats, for the batch's trained
        tokens.

        Ranks that share the sequences all get the whole, so that losses see whole sequences; each
        back-propagates what it computed. NaN and +inf in a trained token's row make its two results
        NaN.
        """
        logprob, entropy = self._held(logits, batch)
        if self._cp_group is None or len(batch.advantages) == 0:
            return logprob, entropy
        both = torch.stack([logprob, entropy])
        logprob, entropy = WholeSequences.apply(
            both, batch.places, len(batch.advantages), self._cp_group
        )
        return logprob, entropy

    def _held(self, logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] each, of the trained tokens whose logits are here."""
        if len(batch.rows) == 0:
            empty = (
                logits.float().sum() * 0.0
            )  # keeps the graph: a filler still takes part in the backward collectives
            return empty.expand(0), logits.new_zeros(0, dtype=torch.float32)
        chunks = _GatherRows.apply(logits, *batch.rows.split(self._chunk_tokens))
        parts = [
            token_logprob_entropy(
                chunk,
                targets,
                temperature=self._temperature,
                vocab_size=self._vocab_size,
                tp_group=self._tp_group,
                inplace_backward=True,  # a chunk is a copy that nobody else reads
                check_values=False,  # an exception on one rank would leave the others waiting
            )
            for chunk, targets in zip(chunks, batch.targets.split(self._chunk_tokens), strict=True)
        ]
        return torch.cat([logprob for logprob, _ in parts]), torch.cat(
            [entropy for _, entropy in parts]
        )


class _GatherRows(torch.autograd.Function):
    """Copies of distinct rows, a chunk for each index; the chunks' gradients fill one tensor, not
    one each.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, *indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*indices)
        ctx.shape = logits.shape
        return tuple(logits.index_select(0, rows) for rows in indices)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = gradients[0].new_zeros(ctx.shape)
        for rows, gradient in zip(ctx.saved_tensors, gradients, strict=True):
            whole.index_copy_(0, rows, gradient)
        return whole, *(None for _ in gradients)
