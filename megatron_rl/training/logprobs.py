"""Log-probabilities and entropies of the trained tokens, from a micro-batch's logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from espo_kernels import token_logprob_entropy
from megatron_rl.training.batch import MicroBatch


class ResponseLogprobs:
    """temperature: the sampling temperature, which divides the logits. vocab_size: true, without padding.

    tp_group: over which the vocabulary is sharded, None when it is not.
    """

    def __init__(
        self, *, temperature: float, vocab_size: int, chunk_tokens: int, tp_group: dist.ProcessGroup | None
    ) -> None:
        self._temperature = temperature
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._tp_group = tp_group

    def __call__(self, logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [rows, V / tp] -> (logprob, entropy) float32 [T] in nats, for the batch's trained tokens."""
        if len(batch.rows) == 0:
            empty = logits.float().sum() * 0.0  # keeps the graph: a filler still takes part in the backward collectives
            return empty.expand(0), logits.new_zeros(0, dtype=torch.float32)
        if logits.device.type == "cpu" and not self._finite(logits):
            # The kernel refuses such logits on CPU. NaN instead lets all ranks agree to skip the step.
            poisoned = (logits.float().sum() * torch.nan).expand(len(batch.rows))
            return poisoned, poisoned.detach()
        chunks = _GatherRows.apply(logits, *batch.rows.split(self._chunk_tokens))
        parts = [
            token_logprob_entropy(
                chunk,
                targets,
                temperature=self._temperature,
                vocab_size=self._vocab_size,
                tp_group=self._tp_group,
                inplace_backward=True,  # a chunk is a copy that nobody else reads
            )
            for chunk, targets in zip(chunks, batch.targets.split(self._chunk_tokens), strict=True)
        ]
        return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _finite(self, logits: torch.Tensor) -> bool:
        """Whether all logits are, on every rank that shares the vocabulary."""
        finite = torch.isfinite(logits.detach().sum(dtype=torch.float64)).int()
        if self._tp_group is not None:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=self._tp_group)
        return bool(finite)


class _GatherRows(torch.autograd.Function):
    """Copies of distinct rows, a chunk for each index; the chunks' gradients fill one tensor, not one each."""

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
