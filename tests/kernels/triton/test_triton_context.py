"""Context parallelism of the Triton loss: the partial sums of two ranks, without processes."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from espo_kernels import EspoGroups, EspoMetrics, EspoResult, espo_groups, espo_policy_loss
from tests.kernels.batches import ResponseBatch, response_batch
from tests.kernels.metric_values import add_metrics, metric_values

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = [7, 1, 12, 0, 4]
Part = Callable[[], tuple[EspoResult, torch.Tensor]]


def loss_and_gradient(
    batch: ResponseBatch, groups: EspoGroups, **options: object
) -> tuple[EspoResult, torch.Tensor]:
    logprobs = batch.logprobs.clone().requires_grad_()
    result = espo_policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, batch.cu_seqlens, groups, **options
    )
    result.loss.backward()
    return result, logprobs.grad


def on_device(batch: ResponseBatch) -> ResponseBatch:
    return ResponseBatch(
        *(
            t.to(DEVICE, torch.float32 if t.is_floating_point() else t.dtype)
            for t in vars(batch).values()
        )
    )


def as_two_ranks(
    monkeypatch: pytest.MonkeyPatch, parts: list[Part]
) -> list[tuple[EspoResult, torch.Tensor]]:
    """Each rank's results. A first run of each part only collects the sums it would send."""
    messages: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: messages.append(sums.clone()))
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    for part in parts:
        part()
    assert len(messages) == 2, "one all-reduce on each rank"
    results = []
    for rank, part in enumerate(parts):
        monkeypatch.setattr(
            dist, "all_reduce", lambda sums, group, other=messages[1 - rank]: sums.add_(other)
        )
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        results.append(part())
    return results


def part_of(
    batch: ResponseBatch, groups: EspoGroups, mine: torch.Tensor, **options: object
) -> Part:
    """The loss of one rank's tokens. mine: [T] bool."""
    counts = [int(part.sum()) for part in mine.split(LENGTHS)]
    cu_seqlens = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    fields = (batch.logprobs, batch.old_logprobs, batch.advantages, batch.entropies)
    part = ResponseBatch(*(field[mine] for field in fields), cu_seqlens, batch.loss_mask[mine])
    part_groups = EspoGroups(groups.group_id[mine], groups.clip, groups.count)
    return lambda: loss_and_gradient(
        part, part_groups, backend="triton", cp_group=object(), **options
    )


@pytest.mark.parametrize("denominator", ["current", "old"])
@pytest.mark.parametrize("num_sequences", [3.0, None])
def test_two_ranks_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, num_sequences: float | None, denominator: str
) -> None:
    """Each rank holds every other token of each sequence.

    A sequence without an advantage does not count in B.
    """
    batch = on_device(response_batch(LENGTHS, 5))
    batch.advantages[7] = 0.0
    groups = espo_groups(
        batch.entropies,
        batch.cu_seqlens,
        vocab_size=9,
        alpha=0.5,
        loss_mask=batch.loss_mask,
        backend="reference",
    )
    options = {"num_sequences": num_sequences, "ratio_denominator": denominator}
    whole, gradient = loss_and_gradient(batch, groups, backend="reference", **options)
    owner = torch.cat([torch.arange(n) % 2 for n in LENGTHS]).to(DEVICE)
    parts = [part_of(batch, groups, owner == rank, **options) for rank in range(2)]
    results = as_two_ranks(monkeypatch, parts)
    total = sum(result.loss.detach() for result, _ in results)
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-5, atol=1e-6)
    for rank, (_, its_gradient) in enumerate(results):
        torch.testing.assert_close(its_gradient, gradient[owner == rank], rtol=1e-5, atol=1e-6)
    assert_metrics_close(add_metrics(*(result.metrics for result, _ in results)), whole.metrics)


def assert_metrics_close(metrics: EspoMetrics, reference: EspoMetrics) -> None:
    values = metric_values(metrics)
    for name, exact in metric_values(reference).items():
        torch.testing.assert_close(values[name], exact, rtol=1e-5, atol=1e-6, equal_nan=True)
