"""The first call of compiled kernels, which takes seconds, while the engines load."""

from __future__ import annotations

import dataclasses

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import ResponseTokens
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.worker import Worker

_TOKENS, _SEQUENCES = 16, 2
_LOGIT_WEIGHTS = ("output_layer.weight", "word_embeddings.weight")


def warm_up(worker: Worker) -> None:
    """Log-probabilities and loss of a made-up micro-batch, forward and backward; the model is left
    alone.

    A collective where ranks share the vocabulary or sequences.
    """
    names = (named for model in worker.policy.models for named in model.named_parameters())
    columns = next(
        (weight.shape[0] for name, weight in names if name.endswith(_LOGIT_WEIGHTS)), None
    )
    if columns is None:  # a pipeline stage without logits
        return
    device, policy = worker.layout.device, worker.policy
    logits = torch.zeros(
        _TOKENS, columns, dtype=torch_dtype(worker.model.dtype), device=device, requires_grad=True
    )
    batch = _batch(worker)
    logprobs, entropies = policy.logprobs(logits * 1.0, batch)
    objective = policy.loss.prepare(
        ResponseTokens(
            logprobs.detach(),
            entropies.detach(),
            batch.rollout_logprobs,
            batch.advantages,
            batch.cu_seqlens,
        )
    )
    objective(logprobs, Denominators(sequences=_SEQUENCES, tokens=_TOKENS)).loss.backward()


def _batch(worker: Worker) -> MicroBatch:
    device, share = worker.layout.device, _TOKENS // _SEQUENCES
    return dataclasses.replace(
        worker.batcher.pack([], []),
        rows=torch.arange(_TOKENS, device=device),
        targets=torch.zeros(_TOKENS, dtype=torch.int64, device=device),
        places=torch.arange(_TOKENS, device=device),
        rollout_logprobs=torch.full((_TOKENS,), -1.0, device=device),
        advantages=torch.ones(_TOKENS, device=device),
        cu_seqlens=torch.arange(0, _TOKENS + 1, share, dtype=torch.int32, device=device),
    )
