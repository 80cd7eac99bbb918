"""Log-probabilities of a micro-batch's trained tokens, also with NaN in the logits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.algorithms import (
    AlgoSettings,
    EspoSettings,
    GrpoSettings,
    GspoSettings,
    SftSettings,
)
from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.training.logprobs import ResponseLogprobs
from tests.losses.shapes import shape_of

ROWS = 37
VOCABULARY = 11
PADDED_VOCABULARY = 12


def micro_batch(count: int, seed: int = 0) -> Any:
    """Make the fields of a `MicroBatch` that `ResponseLogprobs` reads."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(ROWS, generator=rng)[:count].sort().values
    return SimpleNamespace(rows=rows, targets=torch.randint(VOCABULARY, (count,), generator=rng))


def logits(seed: int = 1) -> torch.Tensor:
    return (
        torch.randn(ROWS, PADDED_VOCABULARY, generator=torch.Generator().manual_seed(seed))
        .mul_(4)
        .requires_grad_()
    )


def response_logprobs(chunk_tokens: int, temperature: float = 0.7) -> ResponseLogprobs:
    rollout = RolloutSettings(max_new_tokens=8, temperature=temperature)
    return ResponseLogprobs(rollout, chunk_tokens, vocab_size=VOCABULARY, tp_group=None)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_any_chunk_size_gives_the_softmax_and_its_gradient(chunk_tokens: int) -> None:
    batch = micro_batch(23)
    tensor = logits()
    reference_tensor = logits()
    original = tensor.detach().clone()
    logprob, entropy = response_logprobs(chunk_tokens)(tensor, batch)
    log_p = (reference_tensor[batch.rows, :VOCABULARY] / 0.7).log_softmax(-1)
    reference = log_p.gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(logprob, reference)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1).detach())
    weight = torch.linspace(-1, 1, len(logprob))
    (weight @ logprob).backward()
    (weight @ reference).backward()
    torch.testing.assert_close(tensor.grad, reference_tensor.grad)
    assert torch.equal(tensor, original)


class LargestFloat32(TorchDispatchMode):
    """Records the elements of the largest float32 tensor that an operation returns."""

    num_elements = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.num_elements = max(self.num_elements, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_trained_tokens_keeps_the_graph(dtype: torch.dtype) -> None:
    """A rank whose rows are all of prompts makes no float32 copy of its logits."""
    tensor = logits().detach().to(dtype).requires_grad_()
    with LargestFloat32() as largest:
        logprob, entropy = response_logprobs(8)(tensor * 1, micro_batch(0))
    assert logprob.shape == entropy.shape == (0,)
    assert (logprob.dtype, entropy.dtype) == (torch.float32, torch.float32)
    if dtype is torch.bfloat16:
        assert largest.num_elements <= 1
    logprob.sum().backward()
    assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_makes_its_token_nan(value: float) -> None:
    """The values of the other tokens do not change."""
    tensor = logits()
    batch = micro_batch(9)
    clean = response_logprobs(4)(tensor.detach().clone(), batch)
    with torch.no_grad():
        tensor[batch.rows[5], 2] = value
    bad = torch.arange(9) == 5
    results = response_logprobs(4)(tensor, batch)
    for result, reference in zip(results, clean, strict=True):
        assert torch.equal(result.isnan(), bad)
        assert torch.equal(result[~bad], reference[~bad])
    results[0].sum().backward()
    assert tensor.grad is not None
    assert tensor.grad[batch.rows[5], :VOCABULARY].isnan().all()


@pytest.mark.parametrize("algo", [GrpoSettings(), GspoSettings(), EspoSettings(), SftSettings()])
@pytest.mark.parametrize("when", ["old policy", "update"])
def test_a_nan_logit_makes_every_loss_nan_without_an_error(algo: AlgoSettings, when: str) -> None:
    batch = micro_batch(9)
    tensor = logits()
    nan_tensor = logits()
    with torch.no_grad():
        nan_tensor[batch.rows[5], 2] = torch.nan
    old = response_logprobs(4)(nan_tensor if when == "old policy" else tensor, batch)
    response = ResponseTokens(
        *(tensor.detach() for tensor in old),
        rollout_logprobs=old[0].detach(),
        advantages=torch.linspace(-1, 1, 9),
        cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32),
    )
    objective = open_loss(algo, shape_of(VOCABULARY)).prepare(response)
    current, _ = response_logprobs(4)(nan_tensor if when == "update" else tensor, batch)
    loss = objective(current, Denominators(sequences=2, tokens=9)).loss
    loss.backward()
    is_affected = when == "update" or not isinstance(algo, SftSettings)
    assert bool(loss.isnan()) == is_affected
