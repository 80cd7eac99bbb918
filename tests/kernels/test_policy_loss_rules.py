"""Rules of the objective that hold for any batch: clipping, denominators, masks, metrics."""

import math

import pytest
import torch
from hypothesis import given, settings

from espo_kernels import EspoGroups, EspoResult, espo_groups, espo_policy_loss
from tests.kernels.batches import ResponseBatch, ragged_lengths, response_batch, seeds
from tests.kernels.metric_values import add_metrics, metric_values

BACKENDS = ["reference", "cpu"]


def run(
    batch: ResponseBatch, backend: str, groups: EspoGroups | None = None, **settings: object
) -> tuple[EspoResult, torch.Tensor]:
    """Loss and gradient of a batch in the backend's own precision."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    if groups is None:
        groups = espo_groups(
            batch.entropies.to(dtype),
            batch.cu_seqlens,
            vocab_size=50,
            alpha=0.5,
            loss_mask=batch.loss_mask,
        )
    logprobs = batch.logprobs.to(dtype, copy=True).detach().requires_grad_()
    result = espo_policy_loss(
        logprobs,
        batch.old_logprobs.to(dtype),
        batch.advantages.to(dtype),
        batch.cu_seqlens,
        groups,
        backend=backend,
        **settings,
    )
    result.loss.backward()
    return result, logprobs.grad


def part(batch: ResponseBatch, sequences: slice) -> ResponseBatch:
    """Some sequences of a batch, packed."""
    offsets = batch.cu_seqlens.tolist()
    first = offsets[sequences.start]
    last = offsets[sequences.stop]
    tokens = slice(first, last)
    return ResponseBatch(
        batch.logprobs[tokens],
        batch.old_logprobs[tokens],
        batch.advantages[tokens],
        batch.entropies[tokens],
        batch.cu_seqlens[sequences.start : sequences.stop + 1] - first,
        batch.loss_mask[tokens],
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-0.3, 0.0, 0.3])
def test_gradient_is_zero_exactly_where_the_clip_binds(
    backend: str, advantage: float, log_ratio: float
) -> None:
    batch = ResponseBatch(
        logprobs=torch.full((3,), -1.0 + log_ratio, dtype=torch.float64),
        old_logprobs=torch.full((3,), -1.0, dtype=torch.float64),
        advantages=torch.full((3,), advantage, dtype=torch.float64),
        entropies=torch.ones(3, dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 3]),
        loss_mask=torch.ones(3, dtype=torch.bool),
    )
    groups = espo_groups(batch.entropies, batch.cu_seqlens, vocab_size=9, fixed_clip=0.1)
    result, gradient = run(batch, backend, groups)
    binds = (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0)
    assert bool((gradient == 0).all()) == binds
    assert bool((gradient != 0).all()) != binds
    metrics = metric_values(result.metrics)
    assert metrics["clip_fraction_high"].item() == float(binds and advantage > 0)
    assert metrics["clip_fraction_low"].item() == float(binds and advantage < 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("log_ratio", "advantage"), [(-50.0, 1.0), (50.0, -1.0)])
def test_extreme_ratios_are_clamped_in_value_but_keep_their_gradient(
    backend: str, log_ratio: float, advantage: float
) -> None:
    batch = ResponseBatch(
        logprobs=torch.tensor([-60.0 + log_ratio], dtype=torch.float64),
        old_logprobs=torch.tensor([-60.0], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        entropies=torch.ones(1, dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 1]),
        loss_mask=torch.ones(1, dtype=torch.bool),
    )
    result, gradient = run(batch, backend)
    limit = math.exp(math.copysign(10.0, log_ratio))
    assert result.metrics.ratio_max.max().item() == pytest.approx(limit, rel=1e-6)
    assert gradient.item() == pytest.approx(-limit * advantage, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10, deadline=None)
@given(ragged_lengths, seeds)
def test_micro_batches_add_up_to_the_batch(backend: str, lengths: list[int], seed: int) -> None:
    batch = response_batch(lengths, seed)
    B = len(lengths)
    whole, gradient = run(batch, backend, num_sequences=B)
    pieces = [run(part(batch, slice(i, i + 1)), backend, num_sequences=B) for i in range(B)]
    tolerance = {
        "rtol": 1e-6,
        "atol": 1e-7 if backend == "reference" else 3e-7,
    }  # the other gives float32
    torch.testing.assert_close(
        whole.loss, torch.stack([r.loss for r, _ in pieces]).sum(), **tolerance
    )
    torch.testing.assert_close(gradient, torch.cat([g for _, g in pieces]), **tolerance)
    together = metric_values(add_metrics(*(result.metrics for result, _ in pieces)))
    for name, value in metric_values(whole.metrics).items():
        torch.testing.assert_close(value, together[name], equal_nan=True, **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_denominator_counts_sequences_with_an_unmasked_advantage(backend: str) -> None:
    batch = response_batch([4, 4, 4, 0], 1, mask_share=0.0)
    batch.advantages[:4] = 0.0
    batch.loss_mask[4:8] = False
    whole, gradient = run(batch, backend)
    explicit, explicit_gradient = run(batch, backend, num_sequences=1)
    assert torch.equal(whole.loss, explicit.loss)
    assert torch.equal(gradient, explicit_gradient)
    as_tensor, _ = run(batch, backend, num_sequences=torch.tensor(1))
    assert torch.equal(whole.loss, as_tensor.loss)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_values_do_not_matter(backend: str) -> None:
    batch = response_batch([6, 5], 2, mask_share=0.4)
    result, gradient = run(batch, backend)
    for tensor in (batch.logprobs, batch.old_logprobs, batch.advantages, batch.entropies):
        tensor[~batch.loss_mask] = torch.nan
    again, gradient_again = run(batch, backend)
    assert torch.equal(result.loss, again.loss)
    assert torch.equal(gradient, gradient_again)
    assert not gradient[~batch.loss_mask].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_further_mask_shrinks_the_groups(backend: str) -> None:
    """Tokens masked only in the loss leave |τ| and the mean; ε stays the groups' ε."""
    batch = response_batch([8], 4, mask_share=0.0)
    groups = espo_groups(
        batch.entropies, batch.cu_seqlens, vocab_size=50, fractions=(), fixed_clip=0.5
    )
    keep = torch.tensor([True, False, True, True, False, True, True, True])
    result, gradient = run(batch, backend, groups, loss_mask=keep)
    smaller = ResponseBatch(
        *(t[keep] for t in (batch.logprobs, batch.old_logprobs, batch.advantages, batch.entropies)),
        torch.tensor([0, 6]),
        keep[keep],
    )
    smaller_groups = espo_groups(
        smaller.entropies, smaller.cu_seqlens, vocab_size=50, fractions=(), fixed_clip=0.5
    )
    reference, expected_gradient = run(smaller, backend, smaller_groups)
    torch.testing.assert_close(result.loss, reference.loss)
    torch.testing.assert_close(gradient[keep], expected_gradient)
    assert not gradient[~keep].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lengths", "mask_share"), [([], 0.0), ([0], 0.0), ([0, 0], 0.0), ([3, 2], 1.1)]
)
def test_batch_without_signal_has_zero_loss(
    backend: str, lengths: list[int], mask_share: float
) -> None:
    batch = response_batch(lengths, 5, mask_share=mask_share)
    result, gradient = run(batch, backend)
    assert result.loss.item() == 0
    assert not gradient.any()
    assert result.metrics.tokens.sum() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_count_the_unmasked_tokens_and_bound_their_mean(backend: str) -> None:
    batch = response_batch([7, 9], 6)
    result, _ = run(batch, backend, ratio_denominator="old")
    values = metric_values(result.metrics)
    assert 0 < values["ess"] <= 1 + 1e-9
    sums = {name: pair.tolist() for name, pair in result.metrics.means().items()}
    assert sums["ratio_mean"][1] == int(batch.loss_mask.sum())
    maxima = result.metrics.maxima()
    assert 1 / maxima["inverse_ratio_max"] <= values["ratio_mean"] <= maxima["ratio_max"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_are_read_correctly(backend: str) -> None:
    batch = response_batch([6, 5], 8)
    reference, gradient = run(batch, backend)
    strided_batch = ResponseBatch(
        *(torch.stack([t, t], dim=-1)[..., 0] for t in vars(batch).values())
    )
    assert not strided_batch.logprobs.is_contiguous()
    result, strided_gradient = run(strided_batch, backend)
    assert torch.equal(result.loss, reference.loss)
    assert torch.equal(strided_gradient, gradient)
