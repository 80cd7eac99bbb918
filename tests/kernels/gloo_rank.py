"""One of two gloo ranks: `python gloo_rank.py <rank> <store file>`; asserts, then exits 0."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from espo_kernels import EspoGroups, espo_groups, espo_policy_loss, token_logprob_entropy
from tests.kernels.batches import response_batch

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
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, function):  # type: ignore[no-untyped-def]
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
        whole = logits.clone().double().requires_grad_()
        expected = token_logprob_entropy(
            whole, targets, temperature=0.8, vocab_size=vocab_size, entropy_grad=True
        )
        (weights[0].double() @ expected[0] + weights[1].double() @ expected[1]).backward()
        for backend in BACKENDS:
            columns = slice(10 * rank, 10 * rank + 10)
            shard = logits[:, columns].clone().requires_grad_()
            counter.calls = 0
            logprob, entropy = token_logprob_entropy(
                shard,
                targets,
                temperature=0.8,
                vocab_size=vocab_size,
                tp_group=dist.group.WORLD,
                entropy_grad=True,
                backend=backend,
            )
            (weights[0] @ logprob + weights[1] @ entropy).backward()
            assert counter.calls <= 2, counter.calls
            torch.testing.assert_close(logprob.double(), expected[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                shard.grad.double(), whole.grad[:, columns], rtol=1e-5, atol=1e-5
            )
            gathered = [torch.empty_like(logprob) for _ in range(2)]
            dist.all_gather(gathered, logprob.detach())
            assert torch.equal(*gathered)


def check_context(rank: int, counter: CollectiveCounter) -> None:
    """Each rank holds every other token of each sequence; one sequence lies on rank 0 alone."""
    lengths = [7, 1, 12, 0, 4]
    batch = response_batch(lengths, 5)
    owner = torch.cat([torch.arange(n) % 2 for n in lengths])
    mine = owner == rank
    cu_seqlens = torch.tensor([0, *[int(part.sum()) for part in mine.split(lengths)]]).cumsum(0)
    for backend in BACKENDS:
        for denominator in ("current", "old"):
            dtype = torch.float64 if backend == "reference" else torch.float32
            groups = espo_groups(
                batch.entropies.to(dtype),
                batch.cu_seqlens,
                vocab_size=9,
                alpha=0.5,
                loss_mask=batch.loss_mask,
            )
            tensors = [t.to(dtype) for t in (batch.logprobs, batch.old_logprobs, batch.advantages)]
            whole = tensors[0].clone().requires_grad_()
            options = {"ratio_denominator": denominator, "backend": backend}
            expected = espo_policy_loss(whole, *tensors[1:], batch.cu_seqlens, groups, **options)
            expected.loss.backward()
            part = tensors[0][mine].clone().requires_grad_()
            counter.calls = 0
            result = espo_policy_loss(
                part,
                *(t[mine] for t in tensors[1:]),
                cu_seqlens,
                EspoGroups(groups.group_id[mine], groups.clip, groups.count),
                cp_group=dist.group.WORLD,
                **options,
            )
            result.loss.backward()
            assert counter.calls == 1, counter.calls
            total = result.loss.detach().clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, expected.loss.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(part.grad, whole.grad[mine], rtol=1e-5, atol=1e-6)
            for name, pair in result.metrics.means().items():
                dist.all_reduce(pair)
                torch.testing.assert_close(
                    pair, expected.metrics.means()[name], rtol=1e-5, atol=1e-6
                )


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
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
