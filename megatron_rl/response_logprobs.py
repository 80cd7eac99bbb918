"""Log-probabilities and entropies of the trained tokens, from a micro-batch's logits.

Invariant: the old-policy pass and the update compute them the same way from the same micro-batch, and never hold a
float32 softmax of more than `chunk_tokens` rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from espo_kernels import token_logprob_entropy
from megatron_rl.batching import MicroBatch


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
        parts = [
            token_logprob_entropy(
                logits.index_select(0, rows),
                targets,
                temperature=self._temperature,
                vocab_size=self._vocab_size,
                tp_group=self._tp_group,
            )
            for rows, targets in zip(
                batch.rows.split(self._chunk_tokens), batch.targets.split(self._chunk_tokens), strict=True
            )
        ]
        return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])
