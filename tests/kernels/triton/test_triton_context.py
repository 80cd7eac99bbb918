"""Context parallelism of the Triton loss: two ranks whose partial sums are really added, without
processes.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from espo_kernels import EspoGroups, EspoResult, espo_groups, espo_policy_loss
from tests.kernels.batches import ResponseBatch, response_batch
from tests.kernels.finished import finished, merged

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
    """Each rank's results. A first run of each only collects what it would send."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: sent.append(sums.clone()))
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    for part in parts:
        part()
    assert len(sent) == 2, "one all-reduce on each rank"
    results = []
    for rank, part in enumerate(parts):
        monkeypatch.setattr(
            dist, "all_reduce", lambda sums, group, other=sent[1 - rank]: sums.add_(other)
        )
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        results.append(part())
    return results


@pytest.mark.parametrize("denominator", ["current", "old"])
@pytest.mark.parametrize("num_sequences", [3.0, None])
def test_two_ranks_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, num_sequences: float | None, denominator: str
) -> None:
    """Every other token of each sequence is on the other rank; a sequence without an advantage is
    not counted in B.
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
    parts = []
    for rank in range(2):
        mine = owner == rank
        held = torch.tensor(
            [0, *[int(part.sum()) for part in mine.split(LENGTHS)]], device=DEVICE
        ).cumsum(0)
        fields = (batch.logprobs, batch.old_logprobs, batch.advantages, batch.entropies)
        part = ResponseBatch(*(field[mine] for field in fields), held, batch.loss_mask[mine])
        its_groups = EspoGroups(groups.group_id[mine], groups.clip, groups.count)
        parts.append(
            lambda part=part, its_groups=its_groups: loss_and_gradient(
                part, its_groups, backend="triton", cp_group=object(), **options
            )
        )
    results = as_two_ranks(monkeypatch, parts)
    total = sum(result.loss.detach() for result, _ in results)
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-5, atol=1e-6)
    for rank, (_, its_gradient) in enumerate(results):
        torch.testing.assert_close(its_gradient, gradient[owner == rank], rtol=1e-5, atol=1e-6)
    together = finished(merged(*(result.metrics for result, _ in results)))
    for name, value in finished(whole.metrics).items():
        torch.testing.assert_close(together[name], value, rtol=1e-5, atol=1e-6, equal_nan=True)
