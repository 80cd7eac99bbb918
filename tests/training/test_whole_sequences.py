"""Gathering values from context-parallel ranks. The values of the second rank are artificial."""

import pytest
import torch

from megatron_rl.training import logprobs
from megatron_rl.training.logprobs import WholeSequences


def test_ranks_get_all_values_and_the_gradient_of_their_own_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = torch.tensor([[0.0, 8.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0]])

    def all_reduce(whole: torch.Tensor, group: object) -> None:
        assert group == "context"
        whole += others

    monkeypatch.setattr(logprobs.dist, "all_reduce", all_reduce)
    local_values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 6.0, 7.0]], requires_grad=True)
    whole = WholeSequences.apply(local_values, torch.tensor([0, 2, 3]), 4, "context")
    assert whole.tolist() == [[1, 8, 2, 3], [4, 5, 6, 7]]
    (whole[0] * torch.tensor([10.0, 20.0, 30.0, 40.0])).sum().backward()
    assert local_values.grad is not None and local_values.grad.tolist() == [[10, 30, 40], [0, 0, 0]]


def test_a_rank_without_trained_tokens_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs.dist, "all_reduce", lambda whole, group: whole.fill_(2.0))
    graph = torch.ones(3, requires_grad=True)
    local_values = torch.stack([(graph.sum() * 0).expand(0), torch.zeros(0)])
    whole = WholeSequences.apply(local_values, torch.zeros(0, dtype=torch.int64), 2, None)
    whole.sum().backward()
    assert whole.tolist() == [[2, 2], [2, 2]]
    assert graph.grad is not None and not graph.grad.any()
