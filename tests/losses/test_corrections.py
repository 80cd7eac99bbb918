"""Weights for what is between engine and old policy: numbers by hand, ranges, and what they do to
every loss.
"""

import math
from collections.abc import Callable
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


def of_ratios(
    ratios: list[float], offsets: list[int], advantages: list[float] | None = None
) -> ResponseTokens:
    """Tokens with these π_old / π_rollout; nan: nobody sampled it."""
    old = torch.full((len(ratios),), -1.0)
    return ResponseTokens(
        old_logprobs=old,
        old_entropies=torch.full_like(old, 0.5),
        rollout_logprobs=old - torch.tensor(ratios).log(),
        advantages=torch.tensor(advantages or [1.0] * len(ratios)),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
    )


def weights(kind: Any, ratios: list[float], offsets: list[int], **how: Any) -> list[float]:
    correction = Correction(CorrectionSettings(kind=kind, **how))
    return [
        round(value, 5) for value in correction.weights(kind, of_ratios(ratios, offsets)).tolist()
    ]


RATIOS, OFFSETS = (
    [1.5, 0.4, 6.0, 0.9, 1.2],
    [0, 3, 3, 5],
)  # products 3.6 and 1.08, geometric means 1.53262 and 1.03923


@pytest.mark.parametrize(
    ("kind", "how", "expected"),
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
def test_weights_by_hand(kind: str, how: dict[str, Any], expected: list[float]) -> None:
    assert weights(kind, RATIOS, OFFSETS, **how) == expected


# by kind and level: the ratios that a token or a sequence of two may just have, and just not,
# unless bounds are given
DEFAULTS = [
    ("tis", "token", [1.99], [2.01]),
    ("tis", "sequence", [1.99], [2.01]),
    ("tis", "geometric", [1.99], [2.01]),
    ("icepop", "token", [0.51, 4.99], [0.49, 5.01]),
    ("mis", "sequence", [0.51, 1.99], [0.49, 2.01]),
    ("mis", "geometric", [0.9991, 1.0009], [0.9989, 1.0011]),
]


@pytest.mark.parametrize(("kind", "level", "inside", "outside"), DEFAULTS)
def test_bounds_unless_given_are_those_that_are_documented(
    kind: str, level: str, inside: list[float], outside: list[float]
) -> None:
    for ratio in inside + outside:
        each = ratio if level == "token" else ratio**0.5 if level == "sequence" else ratio
        within = 1.0 if (kind, level) == ("mis", "geometric") else ratio
        expected = within if ratio in inside else 2.0 if kind == "tis" else 0.0
        found = weights(kind, [each, each], [0, 2], level=level)
        assert found == pytest.approx([expected] * 2, abs=2e-5), (ratio, found)


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_tokens_that_nobody_sampled_keep_their_weight_and_stay_out_of_their_sequence(
    kind: str, level: str
) -> None:
    nan = math.nan
    mixed = weights(kind, [1.0005, nan, 1.0007, nan], [0, 3, 4], level=level)
    alone = weights(kind, [1.0005, 1.0007], [0, 2], level=level)
    assert mixed == [alone[0], 1.0, alone[1], 1.0]


def test_what_each_kind_would_do_is_reported_whichever_is_chosen() -> None:
    response = of_ratios([*RATIOS, math.nan], [0, 3, 3, 6])
    expected = {
        "mismatch/tis_weight_mean": (1.5 + 0.4 + 2.0 + 0.9 + 1.2) / 5,
        "mismatch/tis_truncated": 1 / 5,
        "mismatch/icepop_masked": 2 / 5,
        "mismatch/mis_masked": 3 / 5,
    }
    for kind in ("off", "tis", "icepop", "mis"):
        sums = Correction(CorrectionSettings(kind=kind)).metrics(response)  # type: ignore[arg-type]
        assert {key: float(pair[0] / pair[1]) for key, pair in sums.items()} == pytest.approx(
            expected
        ), kind
    chosen = Correction(CorrectionSettings(kind="mis", high=4.0)).metrics(response)
    assert float(chosen["mismatch/mis_masked"][0]) == 0.0


def test_nan_and_infinities_come_out() -> None:
    """Masking them would train on a broken batch: a loss of NaN lets all ranks drop the step."""
    response = of_ratios([1.0, 1.0], [0, 1, 2])
    response.old_logprobs[0] = math.nan
    response.rollout_logprobs[1] = -math.inf
    for kind, level in KINDS:
        correction = Correction(CorrectionSettings(kind=kind, level=level))  # type: ignore[arg-type]
        assert correction.weights(kind, response).isnan().all(), (kind, level)


def test_off_hands_on_the_very_same_tokens() -> None:
    response = of_ratios(RATIOS, OFFSETS)
    assert Correction(CorrectionSettings()).corrected(response) is response


def test_an_empty_micro_batch_has_nothing_to_correct() -> None:
    empty = of_ratios([], [0])
    for kind, level in KINDS:
        correction = Correction(CorrectionSettings(kind=kind, level=level))  # type: ignore[arg-type]
        assert correction.corrected(empty).advantages.shape == (0,)
        assert all(pair.tolist() == [0.0, 0.0] for pair in correction.metrics(empty).values())


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
    correction = Correction(CorrectionSettings(kind=kind[0], level=kind[1], high=3.0))  # type: ignore[arg-type]
    old = torch.zeros(len(logs))
    offsets = torch.tensor([0, cut, cut, len(logs)], dtype=torch.int32)
    response = ResponseTokens(old, old, -torch.tensor(logs), torch.ones_like(old), offsets)
    found = correction.weights(kind[0], response)
    assert ((found >= 0) & (found <= 3.0)).all()
    assert (found[torch.tensor(logs).isnan()] == 1).all()
    if kind[1] != "token":
        sampled = ~torch.tensor(logs).isnan()
        for part in (slice(0, cut), slice(cut, None)):
            assert len(found[part][sampled[part]].unique()) <= 1, "one weight for a sequence"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=12))
def test_off_is_bit_identical_to_no_correction(logs: list[float]) -> None:
    response = of_ratios([math.exp(x) for x in logs], [0, len(logs)])
    assert torch.equal(
        Correction(CorrectionSettings()).corrected(response).advantages, torch.ones(len(logs))
    )


@pytest.mark.parametrize("name", ["grpo", "gspo", "espo"])
@pytest.mark.parametrize("kind", ["tis", "icepop", "mis"])
def test_every_token_s_part_of_the_loss_and_its_gradient_are_multiplied_by_its_weight(
    packed: Callable[..., tuple[torch.Tensor, ResponseTokens]], name: str, kind: Any
) -> None:
    """Clipped tokens too; so the loss is Σ c_t L_t, with the parts L_t of the uncorrected loss
    found one by one.
    """
    logprobs, response = packed([5, 0, 7, 3], seed=3, spread=0.02, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    shifted = response.old_logprobs + torch.randn(15, generator=generator) * (
        0.6 if kind == "mis" else 1.2
    )
    response = ResponseTokens(
        response.old_logprobs,
        response.old_entropies,
        shifted,
        response.advantages,
        response.cu_seqlens,
    )
    correction = Correction(CorrectionSettings(kind=kind))
    loss = open_loss(ALGORITHMS[name](), shape_of(48))

    def value(advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = logprobs.detach().clone().requires_grad_()
        tokens = ResponseTokens(
            response.old_logprobs, response.old_entropies, shifted, advantages, response.cu_seqlens
        )
        result = loss.prepare(tokens)(at, Denominators(sequences=4, tokens=15)).loss
        result.backward()
        assert at.grad is not None
        return result.detach(), at.grad

    weight = correction.weights(kind, response)
    assert int((weight != 1).sum()) > 0 and (kind == "tis" or 0 < int((weight == 0).sum()) < 15)
    parts = torch.stack([value(response.advantages * row)[0] for row in torch.eye(15)])
    plain, corrected = value(response.advantages), value(correction.corrected(response).advantages)
    torch.testing.assert_close(parts.sum(), plain[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(corrected[0], (weight * parts).sum(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(corrected[1], weight * plain[1], rtol=1e-5, atol=1e-7)
