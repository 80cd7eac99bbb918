"""Warms up compiled kernels, whose first call takes seconds, while the engines load."""

from __future__ import annotations

import dataclasses

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import ResponseTokens
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.worker import Worker

_TOKENS = 16
_SEQUENCES = 2
_LOGIT_WEIGHTS = ("output_layer.weight", "word_embeddings.weight")


def warm_up(worker: Worker) -> None:
    """Compute log-probabilities and loss of an artificial micro-batch, forward and backward.

    The model is not changed. A collective where ranks share the vocabulary or sequences.
    """
    num_columns = _num_logit_columns(worker)
    if num_columns is None:  # a pipeline stage without logits
        return
    logits = torch.zeros(
        _TOKENS,
        num_columns,
        dtype=torch_dtype(worker.model.dtype),
        device=worker.layout.device,
        requires_grad=True,
    )
    batch = _make_batch(worker)
    logprobs, entropies = worker.policy.logprobs(logits * 1.0, batch)
    response = ResponseTokens(
        logprobs.detach(),
        entropies.detach(),
        batch.rollout_logprobs,
        batch.advantages,
        batch.cu_seqlens,
    )
    objective = worker.policy.loss.prepare(response)
    denominators = Denominators(sequences=_SEQUENCES, tokens=_TOKENS)
    result = worker.policy.regularization.add(
        objective(logprobs, denominators),
        logprobs,
        entropies,
        reference_logprobs=logprobs,
        weights=batch.advantages,
        denominators=denominators,
    )
    result.loss.backward()


def _num_logit_columns(worker: Worker) -> int | None:
    """Return the vocabulary columns of this rank's logits, None without logits."""
    for model in worker.policy.models:
        for name, weight in model.named_parameters():
            if name.endswith(_LOGIT_WEIGHTS):
                return weight.shape[0]
    return None


def _make_batch(worker: Worker) -> MicroBatch:
    device = worker.layout.device
    sequence_length = _TOKENS // _SEQUENCES
    bounds = torch.arange(0, _TOKENS + 1, sequence_length, dtype=torch.int32, device=device)
    return dataclasses.replace(
        worker.batcher.pack([], []),
        rows=torch.arange(_TOKENS, device=device),
        targets=torch.zeros(_TOKENS, dtype=torch.int64, device=device),
        places=torch.arange(_TOKENS, device=device),
        rollout_logprobs=torch.full((_TOKENS,), -1.0, device=device),
        advantages=torch.ones(_TOKENS, device=device),
        cu_seqlens=bounds,
    )
