"""The KL penalty and the entropy bonus: numbers worked by hand, oracles, and limits."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espo_kernels import token_logprob_entropy
from megatron_rl.config.algorithms import AlgoSettings, GrpoSettings, KlSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, Regularization
from megatron_rl.losses.regularization import reference_divergence

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "policy_losses.toml").read_text())
FINITE = st.floats(-9, 9, allow_nan=False)


def algo(kl: float = 0.0, entropy: float = 0.0) -> AlgoSettings:
    return GrpoSettings(kl=KlSettings(coef=kl), entropy_coef=entropy)


def terms_of(
    settings: AlgoSettings,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    reference: torch.Tensor | None = None,
    *,
    weights: torch.Tensor | None = None,
    tokens: float = 4,
) -> LossResult:
    """Return the terms alone: they are added to a loss of 0."""
    return Regularization(settings).add(
        LossResult(logprobs.sum() * 0, {}),
        logprobs,
        entropies,
        reference_logprobs=reference,
        weights=torch.ones_like(logprobs) if weights is None else weights,
        denominators=Denominators(sequences=2, tokens=tokens),
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-7), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_kl_penalty_matches_golden_numbers(dtype: torch.dtype, tolerance: float) -> None:
    golden: dict[str, Any] = GOLDEN["kl"]
    logprobs = torch.full((3,), -1.0, dtype=dtype, requires_grad=True)
    result = terms_of(
        algo(kl=golden["coef"]),
        logprobs,
        torch.zeros(3, dtype=dtype),
        logprobs.detach() + torch.tensor(golden["log_ratios"], dtype=dtype),
        weights=torch.tensor(golden["weights"], dtype=dtype),
        tokens=golden["tokens"],
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert result.loss.item() == pytest.approx(golden["loss"], rel=tolerance)
    assert logprobs.grad.tolist() == pytest.approx(golden["gradient"], rel=tolerance, abs=1e-9)
    total, count = result.sums["policy/kl_reference"].tolist()
    assert total / count == pytest.approx(golden["mean"], rel=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_entropy_bonus_matches_golden_numbers(dtype: torch.dtype, tolerance: float) -> None:
    """With the vectorised CPU kernel, and with the reference for float64."""
    golden: dict[str, Any] = GOLDEN["entropy"]
    logits = torch.tensor([golden["logits"]], dtype=dtype, requires_grad=True)
    logprobs, entropies = token_logprob_entropy(
        logits, torch.tensor([0]), vocab_size=golden["vocab_size"], entropy_grad=True
    )
    result = terms_of(
        algo(entropy=golden["coef"]),
        logprobs,
        entropies,
        weights=torch.tensor(golden["weights"]),
        tokens=golden["tokens"],
    )
    result.loss.backward()
    assert logits.grad is not None
    assert result.loss.item() == pytest.approx(golden["loss"], rel=tolerance)
    assert logits.grad[0].tolist() == pytest.approx(golden["gradient"], rel=tolerance, abs=1e-9)
    total, count = result.sums["policy/current_entropy"].tolist()
    assert total / count == pytest.approx(golden["mean"], rel=tolerance)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.tuples(FINITE, FINITE, st.floats(0, 3), st.floats(0, 3)), max_size=8),
    kl=st.sampled_from([0.0, 0.01, 0.7]),
    entropy=st.sampled_from([0.0, 0.02]),
)
def test_terms_equal_a_loop_over_tokens(
    values: list[tuple[float, float, float, float]], kl: float, entropy: float
) -> None:
    columns = torch.tensor(values, dtype=torch.float64).reshape(-1, 4).T
    logprobs, reference, entropies, weights = columns
    result = terms_of(algo(kl, entropy), logprobs, entropies, reference, weights=weights, tokens=31)
    total = 0.0
    for logprob, reference_logprob, token_entropy, weight in values:
        x = reference_logprob - logprob
        if x > 10:
            divergence = math.exp(10) - 11 + (math.exp(10) - 1) * (x - 10)
        else:
            divergence = math.exp(x) - 1 - x
        total += weight * (kl * divergence - entropy * token_entropy)
    assert result.loss.item() == pytest.approx(total / 31, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("dtype", "relative", "absolute"),
    [(torch.float64, 1e-9, 1e-12), (torch.float32, 2e-6, 2e-7), (torch.bfloat16, 2e-2, 1e-2)],
    ids=str,
)
@settings(max_examples=60, deadline=None)
@given(value=st.floats(-1000, 1000) | st.floats(-3, 3))
def test_divergence_has_its_derivative_everywhere(
    dtype: torch.dtype, relative: float, absolute: float, value: float
) -> None:
    """Also beyond a log-ratio of 10, where the exponential continues along its tangent."""
    logprobs = torch.tensor([-value], dtype=dtype, requires_grad=True)
    x = -logprobs.item()
    divergence = reference_divergence(logprobs, torch.zeros(1, dtype=dtype))
    divergence.sum().backward()
    assert logprobs.grad is not None
    assert divergence.item() >= -absolute
    gradient = 1 - math.exp(min(x, 10))
    assert logprobs.grad.item() == pytest.approx(gradient, rel=relative, abs=absolute)


def test_a_token_that_the_policy_almost_excludes_keeps_a_finite_gradient() -> None:
    """x = 12: k3 = (e^10 - 11) + (e^10 - 1) * 2 = 22,015.466 + 44,050.932 = 66,066.397."""
    logprobs = torch.tensor([-12.0], requires_grad=True)
    divergence = reference_divergence(logprobs, torch.zeros(1))
    divergence.sum().backward()
    assert divergence.item() == pytest.approx(66066.3974, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(10), rel=1e-6)


def test_the_estimate_is_the_divergence_on_average() -> None:
    """Σ_y π(y) k3(log π_ref(y) - log π(y)) = KL(π ‖ π_ref), exactly."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    mean = (policy.exp() * reference_divergence(policy, reference)).sum()
    kl = (policy.exp() * (policy - reference)).sum()
    assert mean.item() == pytest.approx(kl.item(), rel=1e-12)


def test_coefficients_of_zero_return_the_same_loss() -> None:
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    result = LossResult(logprobs.sum(), {})
    other = Regularization(algo()).add(
        result,
        logprobs,
        logprobs,
        reference_logprobs=None,
        weights=torch.ones(3),
        denominators=Denominators(sequences=1, tokens=3),
    )
    assert other is result
    assert not Regularization(algo(kl=1.0)).entropy_grad
    assert Regularization(algo(entropy=1e-9)).entropy_grad


def test_zero_loss_filler_keeps_its_graph() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    empty = torch.zeros(0) * weight
    result = terms_of(algo(0.5, 0.5), empty, empty, torch.zeros(0), tokens=9)
    assert result.loss.item() == 0.0
    result.loss.backward()
    assert weight.grad is not None
    assert all(pair.tolist() == [0, 0] for pair in result.sums.values())


@pytest.mark.parametrize("field", ["logprobs", "reference", "entropies"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_inputs_give_a_non_finite_loss(field: str, value: float) -> None:
    inputs = {name: torch.full((3,), -1.0) for name in ("logprobs", "reference", "entropies")}
    inputs[field][1] = value
    result = terms_of(algo(0.5, 0.5), **inputs)
    assert not torch.isfinite(result.loss)


def test_a_missing_reference_and_a_missing_denominator_are_named() -> None:
    logprobs = torch.zeros(3)
    with pytest.raises(ValueError, match=r"reference_logprobs have shape None, logprobs \(3,\)"):
        terms_of(algo(kl=0.5), logprobs, logprobs)
    with pytest.raises(ValueError, match=r"reference_logprobs have shape \(2,\)"):
        terms_of(algo(kl=0.5), logprobs, logprobs, torch.zeros(2))
    with pytest.raises(ValueError, match=r"denominators\.tokens=0"):
        terms_of(algo(entropy=0.5), logprobs, logprobs, tokens=0)
