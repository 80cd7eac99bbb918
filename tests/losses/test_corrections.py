"""Importance weights: known values, bounds, metrics, and their effect on every loss."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import ALGORITHMS, CorrectionSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import Correction, ResponseTokens, open_loss
from tests.losses.shapes import shape_of

KINDS = [
    ("tis", "token"),
    ("tis", "sequence"),
    ("tis", "geometric"),
    ("icepop", "token"),
    ("mis", "sequence"),
    ("mis", "geometric"),
]


def response_of(
    ratios: list[float], offsets: list[int], advantages: list[float] | None = None
) -> ResponseTokens:
    """Return tokens with these ratios π_old / π_rollout. NaN: the token was not sampled."""
    old = torch.full((len(ratios),), -1.0)
    return ResponseTokens(
        old_logprobs=old,
        old_entropies=torch.full_like(old, 0.5),
        rollout_logprobs=old - torch.tensor(ratios).log(),
        advantages=torch.tensor(advantages or [1.0] * len(ratios)),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
    )


def correction_of(kind: Any, level: Any, **options: Any) -> Correction:
    return Correction(CorrectionSettings(kind=kind, level=level, **options))


def weights(kind: Any, ratios: list[float], offsets: list[int], **options: Any) -> list[float]:
    correction = Correction(CorrectionSettings(kind=kind, **options))
    values = correction.weights(kind, response_of(ratios, offsets)).tolist()
    return [round(value, 5) for value in values]


# Three sequences, with products 3.6, 1 and 1.08, and geometric means 1.53262, 1 and 1.03923
RATIOS = [1.5, 0.4, 6.0, 0.9, 1.2]
OFFSETS = [0, 3, 3, 5]


@pytest.mark.parametrize(
    ("kind", "options", "values"),
    [
        ("tis", {}, [1.5, 0.4, 2.0, 0.9, 1.2]),
        ("tis", {"high": 1.3}, [1.3, 0.4, 1.3, 0.9, 1.2]),
        ("tis", {"level": "sequence"}, [2.0, 2.0, 2.0, 1.08, 1.08]),
        ("tis", {"level": "sequence", "high": 5.0}, [3.6, 3.6, 3.6, 1.08, 1.08]),
        ("tis", {"level": "geometric"}, [1.53262, 1.53262, 1.53262, 1.03923, 1.03923]),
        ("icepop", {}, [1.5, 0.0, 0.0, 0.9, 1.2]),
        ("icepop", {"low": 0.3, "high": 7.0}, RATIOS),
        ("mis", {}, [0.0, 0.0, 0.0, 1.08, 1.08]),
        ("mis", {"high": 4.0}, [3.6, 3.6, 3.6, 1.08, 1.08]),
        ("mis", {"level": "geometric"}, [0.0] * 5),
        ("mis", {"level": "geometric", "high": 1.1}, [0.0, 0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_known_weights(kind: str, options: dict[str, Any], values: list[float]) -> None:
    assert weights(kind, RATIOS, OFFSETS, **options) == values


# Kind, level, and ratios of a token or sequence just inside and just outside the default bounds
DEFAULTS = [
    ("tis", "token", [1.99], [2.01]),
    ("tis", "sequence", [1.99], [2.01]),
    ("tis", "geometric", [1.99], [2.01]),
    ("icepop", "token", [0.51, 4.99], [0.49, 5.01]),
    ("mis", "sequence", [0.51, 1.99], [0.49, 2.01]),
    ("mis", "geometric", [0.9991, 1.0009], [0.9989, 1.0011]),
]


@pytest.mark.parametrize(("kind", "level", "inside", "outside"), DEFAULTS)
def test_default_bounds(kind: str, level: str, inside: list[float], outside: list[float]) -> None:
    for ratio in inside + outside:
        token_ratio = ratio**0.5 if level == "sequence" else ratio
        if ratio in inside:
            weight = 1.0 if (kind, level) == ("mis", "geometric") else ratio
        else:
            weight = 2.0 if kind == "tis" else 0.0
        values = weights(kind, [token_ratio, token_ratio], [0, 2], level=level)
        assert values == pytest.approx([weight] * 2, abs=2e-5), (ratio, values)


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_tokens_that_were_not_sampled_have_weight_one(kind: str, level: str) -> None:
    nan = math.nan
    with_others = weights(kind, [1.0005, nan, 1.0007, nan], [0, 3, 4], level=level)
    alone = weights(kind, [1.0005, 1.0007], [0, 2], level=level)
    assert with_others == [alone[0], 1.0, alone[1], 1.0]


def test_metrics_of_all_kinds_are_reported_for_any_setting() -> None:
    response = response_of([*RATIOS, math.nan], [0, 3, 3, 6])
    means = {
        "mismatch/tis_weight_mean": (1.5 + 0.4 + 2.0 + 0.9 + 1.2) / 5,
        "mismatch/tis_truncated": 1 / 5,
        "mismatch/icepop_masked": 2 / 5,
        "mismatch/mis_masked": 3 / 5,
    }
    for kind in ("off", "tis", "icepop", "mis"):
        sums = Correction(CorrectionSettings(kind=kind)).metrics(response)  # type: ignore[arg-type]
        values = {key: float(pair[0] / pair[1]) for key, pair in sums.items()}
        assert values == pytest.approx(means), kind
    sums = Correction(CorrectionSettings(kind="mis", high=4.0)).metrics(response)
    assert float(sums["mismatch/mis_masked"][0]) == 0.0


def test_nan_and_infinities_are_propagated() -> None:
    """A NaN loss lets all ranks skip the step, but masking would train on an invalid batch."""
    response = response_of([1.0, 1.0], [0, 1, 2])
    response.old_logprobs[0] = math.nan
    response.rollout_logprobs[1] = -math.inf
    for kind, level in KINDS:
        correction = correction_of(kind, level)
        assert correction.weights(kind, response).isnan().all(), (kind, level)


def test_off_returns_the_same_object() -> None:
    response = response_of(RATIOS, OFFSETS)
    assert Correction(CorrectionSettings()).apply(response) is response


def test_empty_micro_batch() -> None:
    empty = response_of([], [0])
    for kind, level in KINDS:
        correction = correction_of(kind, level)
        assert correction.apply(empty).advantages.shape == (0,)
        assert all(pair.tolist() == [0.0, 0.0] for pair in correction.metrics(empty).values())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.floats(-12, 12) | st.just(math.nan), min_size=1, max_size=24),
    st.data(),
)
def test_weights_are_in_range_for_all_ratios(
    kind: tuple[str, str], logs: list[float], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(logs)))
    correction = correction_of(*kind, high=3.0)
    old = torch.zeros(len(logs))
    offsets = torch.tensor([0, cut, cut, len(logs)], dtype=torch.int32)
    response = ResponseTokens(old, old, -torch.tensor(logs), torch.ones_like(old), offsets)
    values = correction.weights(kind[0], response)
    is_sampled = ~torch.tensor(logs).isnan()
    assert ((values >= 0) & (values <= 3.0)).all()
    assert (values[~is_sampled] == 1).all()
    if kind[1] != "token":
        for part in (slice(0, cut), slice(cut, None)):
            sequence_values = values[part][is_sampled[part]]
            assert len(sequence_values.unique()) <= 1, "a sequence has one weight"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=12))
def test_off_is_bit_identical_to_no_correction(logs: list[float]) -> None:
    response = response_of([math.exp(x) for x in logs], [0, len(logs)])
    advantages = Correction(CorrectionSettings()).apply(response).advantages
    assert torch.equal(advantages, torch.ones(len(logs)))


def loss_and_gradient(
    name: str, logprobs: torch.Tensor, response: ResponseTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logprobs.detach().clone().requires_grad_()
    loss = open_loss(ALGORITHMS[name](), shape_of(48))
    result = loss.prepare(response)(leaf, Denominators(sequences=4, tokens=15)).loss
    result.backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def losses_of_single_tokens(
    name: str, logprobs: torch.Tensor, response: ResponseTokens
) -> torch.Tensor:
    """Compute each token's loss with the advantages of all other tokens set to 0."""
    losses = []
    for row in torch.eye(len(logprobs)):
        one_token = replace(response, advantages=response.advantages * row)
        losses.append(loss_and_gradient(name, logprobs, one_token)[0])
    return torch.stack(losses)


@pytest.mark.parametrize("name", ["grpo", "gspo", "espo", "cispo"])
@pytest.mark.parametrize("kind", ["tis", "icepop", "mis"])
def test_each_tokens_loss_and_gradient_are_multiplied_by_its_weight(
    make_response: Callable[..., tuple[torch.Tensor, ResponseTokens]], name: str, kind: Any
) -> None:
    """The corrected loss is Σ c_t L_t, also for clipped tokens."""
    logprobs, response = make_response([5, 0, 7, 3], seed=3, spread=0.02, dtype=torch.float32)
    noise = torch.randn(15, generator=torch.Generator().manual_seed(1))
    scale = 0.6 if kind == "mis" else 1.2
    response = replace(response, rollout_logprobs=response.old_logprobs + noise * scale)
    correction = correction_of(kind, None)
    weight = correction.weights(kind, response)
    assert (weight != 1).any()
    assert kind == "tis" or 0 < int((weight == 0).sum()) < 15
    parts = losses_of_single_tokens(name, logprobs, response)
    plain_loss, plain_gradient = loss_and_gradient(name, logprobs, response)
    loss, gradient = loss_and_gradient(name, logprobs, correction.apply(response))
    torch.testing.assert_close(parts.sum(), plain_loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss, (weight * parts).sum(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, weight * plain_gradient, rtol=1e-5, atol=1e-7)
