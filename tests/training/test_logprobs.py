"""Log-probabilities of a micro-batch's trained tokens, and what NaN in the logits becomes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.training.logprobs import ResponseLogprobs

ROWS, VOCABULARY, PADDED = 37, 11, 12


def micro_batch(count: int, seed: int = 0) -> Any:
    """Only what `ResponseLogprobs` reads of a `MicroBatch`."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(ROWS, generator=rng)[:count].sort().values
    return SimpleNamespace(rows=rows, targets=torch.randint(VOCABULARY, (count,), generator=rng))


def logits(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(seed)).mul_(4).requires_grad_()


def response_logprobs(chunk_tokens: int, temperature: float = 0.7) -> ResponseLogprobs:
    return ResponseLogprobs(temperature=temperature, vocab_size=VOCABULARY, chunk_tokens=chunk_tokens, tp_group=None)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_any_chunk_size_gives_the_softmax_and_its_gradient(chunk_tokens: int) -> None:
    batch, mine, plain = micro_batch(23), logits(), logits()
    untouched = mine.detach().clone()
    logprob, entropy = response_logprobs(chunk_tokens)(mine, batch)
    log_p = (plain[batch.rows, :VOCABULARY] / 0.7).log_softmax(-1)
    expected = log_p.gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1).detach())
    weight = torch.linspace(-1, 1, len(logprob))
    (weight @ logprob).backward()
    (weight @ expected).backward()
    torch.testing.assert_close(mine.grad, plain.grad)
    assert torch.equal(mine, untouched)


def test_a_batch_without_trained_tokens_keeps_the_graph() -> None:
    mine = logits()
    logprob, entropy = response_logprobs(8)(mine, micro_batch(0))
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert mine.grad is not None and not mine.grad.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_make_every_result_nan(value: float) -> None:
    mine, batch = logits(), micro_batch(9)
    with torch.no_grad():
        mine[30, 2] = value
    logprob, entropy = response_logprobs(4)(mine, batch)
    assert logprob.shape == entropy.shape == (9,)
    assert logprob.isnan().all() and entropy.isnan().all()
    logprob.sum().backward()
    assert mine.grad is not None and mine.grad.isnan().all()
