"""Counts compilations of kernels after warm-up, on the stand-in for a GPU: a program of its own.

    python -m tests.training.compilations DTYPE STEPS

A step has 8 micro-batches, each with 1 to 32 sequences of up to 8,192 tokens together: old policy,
groups, loss, both gradients. The last micro-batches have one token, and one sequence. DTYPE: of the
logits, float32 or bfloat16.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from bench.gpu_stand_in import Launch, TritonLaunch, gpu_stand_in

from megatron_rl.config.algorithms import EspoSettings
from megatron_rl.config.schema import ModelSettings, ParallelSettings, RolloutSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import Regularization, ResponseTokens, open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from megatron_rl.training.warm_up import warm_up
from tests.support.policies import TWO_DIGIT_ADDITION

_COLUMNS = 151_936
_TRUE_VOCABULARY = 151_669
_HOPPER = 90
_GPU = torch.device("cuda", 0)


def make_worker(dtype: str) -> Any:
    """A worker whose model is never called. Its logits have the columns of Qwen3."""
    model = torch.nn.Module()
    model.output_layer = torch.nn.Linear(8, _COLUMNS, bias=False, device="meta")
    shape = dataclasses.replace(read_shape(TWO_DIGIT_ADDITION), vocab_size=_TRUE_VOCABULARY)
    algo = EspoSettings()
    logprobs = ResponseLogprobs(
        RolloutSettings(max_new_tokens=4),
        vocab_size=_TRUE_VOCABULARY,
        tp_group=None,
    )
    view = RankView.for_rank(shape.num_layers, ParallelSettings(), pp_rank=0, cp_rank=0, tp_rank=0)
    return SimpleNamespace(
        layout=SimpleNamespace(device=_GPU),
        policy=SimpleNamespace(
            models=[model],
            logprobs=logprobs,
            loss=open_loss(algo, shape),
            regularization=Regularization(algo),
        ),
        batcher=Batcher(view, None, torch.device("cpu")),
        model=ModelSettings(path=str(TWO_DIGIT_ADDITION), dtype=dtype),  # type: ignore[arg-type]
    )


def micro_batch(empty: MicroBatch, tokens: int, num_sequences: int) -> MicroBatch:
    """A micro-batch of a shape, without data. Most tensors are slices, with any alignment."""
    floats = torch.empty(3 * tokens + 3, device=_GPU)
    return dataclasses.replace(
        empty,
        rows=torch.empty(tokens, dtype=torch.long, device=_GPU),
        targets=torch.empty(tokens, dtype=torch.long, device=_GPU),
        places=torch.empty(tokens, dtype=torch.long, device=_GPU),
        rollout_logprobs=floats[1 : tokens + 1],
        advantages=floats[tokens + 2 : 2 * tokens + 2],
        cu_seqlens=torch.empty(num_sequences + 1, dtype=torch.int32, device=_GPU),
    )


def train(worker: Any, batch: MicroBatch) -> None:
    """Compute the old policy of a micro-batch, its loss and the gradient of its logits."""
    policy = worker.policy
    dtype = getattr(torch, worker.model.dtype)
    tokens = len(batch.rows)
    logits = torch.empty(tokens, _COLUMNS, dtype=dtype, device=_GPU, requires_grad=True)
    old_logprobs, old_entropies = policy.logprobs(logits.detach(), batch)
    response = ResponseTokens(
        old_logprobs, old_entropies, batch.rollout_logprobs, batch.advantages, batch.cu_seqlens
    )
    objective = policy.loss.prepare(response)
    logprobs, _ = policy.logprobs(logits * 1.0, batch)
    objective(logprobs, Denominators(sequences=7, tokens=tokens)).loss.backward()


def shapes(steps: int) -> Iterator[tuple[int, int]]:
    """(tokens, sequences) of every micro-batch."""
    rng = random.Random(0)
    for _ in range(8 * steps - 3):
        num_sequences = rng.randint(1, 32)
        yield rng.randint(max(2, num_sequences), 8192), num_sequences
    yield from ((1, 1), (16, 16), (8192, 1))


def binaries(launches: Sequence[Launch]) -> set[str]:
    """The compiled kernels that were launched."""
    return {one.binary.hash for one in launches if isinstance(one, TritonLaunch)}


def main() -> None:
    """Print the numbers of compilations in warm-up and after it, as JSON."""
    worker = make_worker(sys.argv[1])
    empty = worker.batcher.pack([], [])
    with gpu_stand_in(_HOPPER) as launches:
        warm_up(worker)
        ready = binaries(launches)
        launches.clear()
        for tokens, num_sequences in shapes(int(sys.argv[2])):
            train(worker, micro_batch(empty, tokens, num_sequences))
        later = binaries(launches) - ready
        names = {one.kernel for one in launches if isinstance(one, TritonLaunch)}
    print(json.dumps({"warm_up": len(ready), "later": len(later), "kernels": sorted(names)}))


if __name__ == "__main__":
    main()
