"""The reference against finite differences, and the CPU path against the reference."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from espo_kernels import EspoGroups, EspoResult, espo_groups, espo_policy_loss
from tests.kernels.batches import (
    Group,
    ResponseBatch,
    each_group,
    fraction_lists,
    is_close_to_a_bound,
    ragged_lengths,
    response_batch,
    seeds,
)
from tests.kernels.metric_values import metric_values

denominators = st.sampled_from(["current", "old"])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), seeds, fraction_lists)
def test_gradcheck_where_the_stop_gradient_is_the_derivative(
    lengths: list[int], seed: int, fractions: tuple[float, ...]
) -> None:
    """With one advantage a sequence, Σ_t sg[s] ∂log π_t A / |τ| is the derivative of s A."""
    batch = response_batch(lengths, seed, drift=0.01, one_advantage=True)
    groups = espo_groups(
        batch.entropies,
        batch.cu_seqlens,
        vocab_size=9,
        fractions=fractions,
        fixed_clip=0.4,
        loss_mask=batch.loss_mask,
    )

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return espo_policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.cu_seqlens,
            groups,
            num_sequences=2,
        ).loss

    assert torch.autograd.gradcheck(loss, (batch.logprobs.clone().requires_grad_(),))


def objective_slope(group: Group, A: torch.Tensor) -> torch.Tensor:
    """Central difference of each token's term, as a function of its log-probability."""

    def term(h: float) -> torch.Tensor:
        s = group.ratios * torch.tensor(h, dtype=torch.float64).exp()
        return torch.minimum(s * A, s.clamp(1 - group.clip, 1 + group.clip) * A)

    return (term(1e-6) - term(-1e-6)) / 2e-6


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(ragged_lengths, seeds, fraction_lists, denominators)
def test_gradient_is_the_slope_with_the_group_ratio_held_fixed(
    lengths: list[int], seed: int, fractions: tuple[float, ...], denominator: str
) -> None:
    batch = response_batch(lengths, seed)
    groups = espo_groups(
        batch.entropies,
        batch.cu_seqlens,
        vocab_size=50,
        alpha=0.5,
        fractions=fractions,
        loss_mask=batch.loss_mask,
    )
    logprobs = batch.logprobs.clone().requires_grad_()
    espo_policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.cu_seqlens,
        groups,
        ratio_denominator=denominator,
        num_sequences=3,
    ).loss.backward()
    for group in each_group(batch, groups, denominator):
        row = groups.count[group.response]
        slope = objective_slope(group, batch.advantages[group.tokens])
        gradient = -slope / (3 * (row > 0).sum() * row[group.tau])
        smooth = group.distance > 1e-5
        torch.testing.assert_close(
            logprobs.grad[group.tokens][smooth], gradient[smooth], rtol=1e-6, atol=1e-10
        )
    assert not logprobs.grad[~batch.loss_mask].any()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(ragged_lengths, seeds, fraction_lists, denominators, st.booleans())
def test_cpu_path_equals_the_reference(
    lengths: list[int],
    seed: int,
    fractions: tuple[float, ...],
    denominator: str,
    coarse_entropies: bool,
) -> None:
    batch = response_batch(lengths, seed, coarse_entropies=coarse_entropies)
    groups_r, result_r, grad_r = run_backend(batch, fractions, denominator, "reference")
    groups_c, result_c, grad_c = run_backend(batch, fractions, denominator, "cpu")
    assume(not is_close_to_a_bound(batch, groups_r, denominator))  # one of them computes in float64
    assert torch.equal(groups_r.group_id, groups_c.group_id)
    assert torch.equal(groups_r.count, groups_c.count)
    torch.testing.assert_close(groups_r.clip, groups_c.clip, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(result_r.loss, result_c.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_r, grad_c, rtol=1e-5, atol=1e-7)
    for name, value in metric_values(result_r.metrics).items():
        torch.testing.assert_close(
            value, metric_values(result_c.metrics)[name], rtol=1e-5, atol=1e-7, equal_nan=True
        )


def run_backend(
    batch: ResponseBatch, fractions: tuple[float, ...], denominator: str, backend: str
) -> tuple[EspoGroups, EspoResult, torch.Tensor]:
    """Groups, loss, and three times the gradient, in float32."""
    groups = espo_groups(
        batch.entropies.float(),
        batch.cu_seqlens,
        vocab_size=50,
        alpha=0.5,
        fractions=fractions,
        loss_mask=batch.loss_mask,
        backend=backend,
    )
    logprobs = batch.logprobs.float().requires_grad_()
    result = espo_policy_loss(
        logprobs,
        batch.old_logprobs.float(),
        batch.advantages.float(),
        batch.cu_seqlens,
        groups,
        ratio_denominator=denominator,
        backend=backend,
    )
    (result.loss * 3).backward()
    return groups, result, logprobs.grad
