"""One of two gloo ranks: `python gloo_rank.py <rank> <store file>`; asserts, then exits 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from espo_kernels import (
    EspoGroups,
    EspoResult,
    espo_groups,
    espo_policy_loss,
    token_logprob_entropy,
)
from tests.kernels.batches import ResponseBatch, response_batch

BACKENDS = ("reference", "cpu")


class CollectiveCounter:
    """Counts the collectives that c10d functions issue."""

    def __init__(self) -> None:
        self.calls = 0
        for name in (
            "all_reduce",
            "all_gather",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "broadcast",
        ):
            setattr(dist, name, self._count_calls(getattr(dist, name)))

    def _count_calls(self, function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            self.calls += 1
            return function(*args, **kwargs)

        return call


def check_vocabulary(rank: int, counter: CollectiveCounter) -> None:
    """Shards of 10 columns; a vocabulary of 17 pads the second, one of 8 leaves it empty."""
    for vocab_size in (20, 17, 8):
        rng = torch.Generator().manual_seed(1)
        logits = torch.randn(6, 20, generator=rng) * 5 + 300
        targets = torch.randint(vocab_size, (6,), generator=rng)
        weights = torch.randn(2, 6, generator=rng)
        options = {"temperature": 0.8, "vocab_size": vocab_size, "entropy_grad": True}
        whole = logits.clone().double().requires_grad_()
        reference = token_logprob_entropy(whole, targets, **options)
        weighted_sum(weights.double(), reference).backward()
        columns = slice(10 * rank, 10 * rank + 10)
        for backend in BACKENDS:
            shard = logits[:, columns].clone().requires_grad_()
            counter.calls = 0
            logprob, entropy = token_logprob_entropy(
                shard, targets, tp_group=dist.group.WORLD, backend=backend, **options
            )
            weighted_sum(weights, (logprob, entropy)).backward()
            assert counter.calls <= 2, counter.calls
            results = (logprob, entropy, shard.grad)
            for values, exact in zip(results, (*reference, whole.grad[:, columns]), strict=True):
                assert_close(values.double(), exact, atol=1e-5)
            assert_equal_on_ranks(logprob.detach())


def weighted_sum(weights: torch.Tensor, results: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0] @ results[0] + weights[1] @ results[1]


def assert_close(values: torch.Tensor, reference: torch.Tensor, *, atol: float) -> None:
    torch.testing.assert_close(values, reference, rtol=1e-5, atol=atol)


def assert_equal_on_ranks(values: torch.Tensor) -> None:
    copies = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(copies, values)
    assert torch.equal(*copies)


def check_context(rank: int, counter: CollectiveCounter) -> None:
    """Each rank holds every other token of each sequence; one sequence lies on rank 0 alone."""
    for backend in BACKENDS:
        for denominator in ("current", "old"):
            check_context_loss(rank, counter, backend, denominator)


def tokens_of(rank: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask of the rank's tokens, their cu_seqlens): every other token of each sequence."""
    mine = torch.cat([torch.arange(n) % 2 for n in lengths]) == rank
    counts = [int(part.sum()) for part in mine.split(lengths)]
    return mine, torch.tensor([0, *counts]).cumsum(0)


def context_groups(batch: ResponseBatch, dtype: torch.dtype) -> EspoGroups:
    return espo_groups(
        batch.entropies.to(dtype),
        batch.cu_seqlens,
        vocab_size=9,
        alpha=0.5,
        loss_mask=batch.loss_mask,
    )


def check_context_loss(
    rank: int, counter: CollectiveCounter, backend: str, denominator: str
) -> None:
    lengths = [7, 1, 12, 0, 4]
    batch = response_batch(lengths, 5)
    mine, cu_seqlens = tokens_of(rank, lengths)
    dtype = torch.float64 if backend == "reference" else torch.float32
    groups = context_groups(batch, dtype)
    part_groups = EspoGroups(groups.group_id[mine], groups.clip, groups.count)
    logprobs = batch.logprobs.to(dtype)
    constants = [batch.old_logprobs.to(dtype), batch.advantages.to(dtype)]
    options = {"ratio_denominator": denominator, "backend": backend}

    whole = logprobs.clone().requires_grad_()
    reference = espo_policy_loss(whole, *constants, batch.cu_seqlens, groups, **options)
    reference.loss.backward()
    part = logprobs[mine].requires_grad_()
    constants = [t[mine] for t in constants]
    counter.calls = 0
    result = espo_policy_loss(
        part, *constants, cu_seqlens, part_groups, cp_group=dist.group.WORLD, **options
    )
    result.loss.backward()
    assert counter.calls == 1, counter.calls
    assert_close(part.grad, whole.grad[mine], atol=1e-6)
    assert_sums_to(result, reference)


def assert_sums_to(result: EspoResult, reference: EspoResult) -> None:
    """The ranks' losses and metrics add up to the reference's."""
    total = result.loss.detach().clone()
    dist.all_reduce(total)
    assert_close(total, reference.loss.detach(), atol=1e-6)
    means = reference.metrics.means()
    for name, pair in result.metrics.means().items():
        dist.all_reduce(pair)
        assert_close(pair, means[name], atol=1e-6)


def main() -> None:
    rank = int(sys.argv[1])
    store = sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        counter = CollectiveCounter()
        check_vocabulary(rank, counter)
        check_context(rank, counter)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
