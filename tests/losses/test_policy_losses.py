"""Every loss against a plain loop over tokens in float64, and what all losses have in common."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import (
    AlgoSettings,
    EspoSettings,
    GrpoSettings,
    GspoSettings,
    SftSettings,
)
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, PolicyLoss, ResponseTokens, open_loss
from tests.losses.shapes import shape_of

Packed = Callable[..., tuple[torch.Tensor, ResponseTokens]]
GRPO, GSPO = GrpoSettings(clip_low=0.2, clip_high=0.28), GspoSettings(clip_low=0.05, clip_high=0.08)
ESPO, VOCABULARY = EspoSettings(alpha=0.2, min_clip=0.01), 48
SETTINGS: dict[str, AlgoSettings] = {"grpo": GRPO, "gspo": GSPO, "espo": ESPO, "sft": SftSettings()}
ALL = list(SETTINGS)
RATIOS = ["grpo", "gspo", "espo"]
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
GENERATED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def build(name: str) -> PolicyLoss:
    return open_loss(SETTINGS[name], shape_of(VOCABULARY))


def run(
    name: str, logprobs: torch.Tensor, response: ResponseTokens, denominators: Denominators
) -> LossResult:
    return build(name).prepare(response)(logprobs, denominators)


def counts(response: ResponseTokens) -> Denominators:
    return Denominators(sequences=len(response.cu_seqlens) - 1, tokens=len(response.advantages))


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)


def token_groups(entropies: list[float]) -> list[list[int]]:
    """ESPO: the ceil(0.2 n) most uncertain tokens, ties by position, and the rest."""
    order = sorted(range(len(entropies)), key=lambda t: (-entropies[t], t))
    k = max(1, math.ceil(0.2 * len(order)))
    return [g for g in (order[:k], order[k:]) if g]


def loop(
    name: str, logprobs: torch.Tensor, response: ResponseTokens, denominators: Denominators
) -> float:
    """The loss as its paper writes it, one token at a time, with Python floats."""
    total = 0.0
    for start, end in pairwise(response.cu_seqlens.tolist()):
        log_ratio = (logprobs - response.old_logprobs)[start:end].tolist()
        advantage = response.advantages[start:end].tolist()
        n = end - start
        if n == 0:
            continue
        if name == "sft":
            total += sum(logprobs[start:end].tolist())
        elif name == "grpo":
            pairs = zip(log_ratio, advantage, strict=True)
            total += sum(surrogate(math.exp(x), a, GRPO.clip_low, GRPO.clip_high) for x, a in pairs)
        elif name == "gspo":
            s = math.exp(sum(log_ratio) / n)
            total += sum(surrogate(s, a, GSPO.clip_low, GSPO.clip_high) for a in advantage) / n
        else:
            entropy = response.old_entropies[start:end].tolist()
            members = token_groups(entropy)
            for group in members:
                s = math.exp(sum(log_ratio[t] for t in group) / len(group))
                mean_entropy = sum(entropy[t] for t in group) / len(group)
                clip = max(ESPO.min_clip, ESPO.alpha * mean_entropy / math.log(VOCABULARY))
                total += (
                    sum(surrogate(s, advantage[t], clip, clip) for t in group)
                    / len(group)
                    / len(members)
                )
    return -total / (denominators.tokens if name in ("grpo", "sft") else denominators.sequences)


@pytest.mark.parametrize("name", ALL)
@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 0.05, 0.3, 2.0]))
def test_the_loss_is_what_a_loop_over_tokens_gives(
    packed: Packed, name: str, lengths: list[int], seed: int, spread: float
) -> None:
    logprobs, response = packed(lengths, seed, spread=spread)
    denominators = Denominators(sequences=7, tokens=31)
    result = run(name, logprobs, response, denominators)
    assert result.loss.item() == pytest.approx(
        loop(name, logprobs, response, denominators), rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_the_value(packed: Packed, name: str) -> None:
    # With one advantage per sequence, the gradient through the tokens is the plain derivative of
    # the value.
    logprobs, response = packed([3, 1, 6], seed=4, spread=0.02)
    objective = build(name).prepare(response)
    assert torch.autograd.gradcheck(lambda x: objective(x, counts(response)).loss, (logprobs,))


@pytest.mark.parametrize("name", ALL)
@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), data=st.data())
def test_splitting_and_reordering_change_nothing(
    packed: Packed, name: str, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    logprobs, response = packed(lengths, seed)
    denominators = counts(response)
    whole = run(name, logprobs, response, denominators)
    (gradient,) = torch.autograd.grad(whole.loss, logprobs)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(order)))
    offsets = response.cu_seqlens.tolist()
    total, sums = 0.0, {key: torch.zeros(2, dtype=torch.float64) for key in whole.sums}
    maxima: dict[str, float] = {}
    for part in (order[:cut], order[cut:]):
        index = torch.tensor(
            [t for i in part for t in range(offsets[i], offsets[i + 1])], dtype=torch.int64
        )
        piece = ResponseTokens(
            response.old_logprobs[index],
            response.old_entropies[index],
            response.rollout_logprobs[index],
            response.advantages[index],
            torch.tensor([0, *(lengths[i] for i in part)]).cumsum(0).int(),
        )
        leaf = logprobs.detach()[index].requires_grad_()
        result = run(name, leaf, piece, denominators)
        (piece_gradient,) = torch.autograd.grad(result.loss, leaf)
        torch.testing.assert_close(piece_gradient, gradient[index], rtol=1e-9, atol=1e-12)
        total += result.loss.item()
        for key, pair in result.sums.items():
            sums[key] += pair
        for key, value in result.maxima.items():
            maxima[key] = max(maxima.get(key, 0.0), value.item())
    assert total == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    for key, pair in whole.sums.items():
        torch.testing.assert_close(sums[key], pair.double(), rtol=1e-5, atol=1e-5, msg=key)
    assert maxima == pytest.approx({key: value.item() for key, value in whole.maxima.items()})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]])
def test_the_filler_gives_zero_that_is_still_in_the_graph(name: str, offsets: list[int]) -> None:
    empty = torch.zeros(0)
    response = ResponseTokens(empty, empty, empty, empty, torch.tensor(offsets, dtype=torch.int32))
    weight = torch.tensor(2.0, requires_grad=True)
    result = run(name, empty * weight, response, Denominators(sequences=3, tokens=9))
    assert result.loss.item() == 0.0
    result.loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 0.0
    assert all(pair.tolist() == [0, 0] for pair in result.sums.values())
    assert result.maxima == {}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, field) for name in RATIOS for field in ("logprobs", "old_logprobs", "advantages")),
        ("sft", "logprobs"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_looks_plausible(
    packed: Packed, name: str, field: str, value: float
) -> None:
    logprobs, response = packed([3, 4], dtype=torch.float32)
    target = logprobs.detach().clone() if field == "logprobs" else getattr(response, field)
    target[2] = value
    if field == "logprobs":
        logprobs = target.requires_grad_()
    result = run(name, logprobs, response, counts(response))
    result.loss.backward()
    assert logprobs.grad is not None
    assert not (torch.isfinite(result.loss) and torch.isfinite(logprobs.grad).all())


def test_entropies_that_are_not_finite_make_espo_s_loss_nan(packed: Packed) -> None:
    logprobs, response = packed([3, 4], dtype=torch.float32)
    response.old_entropies[1] = math.nan
    assert math.isnan(run("espo", logprobs, response, counts(response)).loss.item())


@pytest.mark.parametrize("name", RATIOS)
def test_huge_ratios_stay_finite_and_keep_their_gradient(packed: Packed, name: str) -> None:
    logprobs, response = packed([3, 4], dtype=torch.float32)
    far = (logprobs.detach() + 300).requires_grad_()
    response.advantages.fill_(-1.0)
    result = run(name, far, response, counts(response))
    result.loss.backward()
    assert far.grad is not None
    assert torch.isfinite(result.loss)
    assert (far.grad > 0).all(), "a negative advantage still lowers the probability"


@pytest.mark.parametrize("name", ALL)
def test_float32_agrees_with_float64(packed: Packed, name: str) -> None:
    exact_logprobs, exact = packed([5] * 40, seed=1)
    logprobs, response = packed([5] * 40, seed=1, dtype=torch.float32)
    expected = run(name, exact_logprobs, exact, counts(exact)).loss.item()
    assert run(name, logprobs, response, counts(response)).loss.item() == pytest.approx(
        expected, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("name", RATIOS)
def test_an_unchanged_policy_gives_the_plain_policy_gradient(packed: Packed, name: str) -> None:
    _, response = packed([3, 5])
    logprobs = response.old_logprobs.clone().requires_grad_()
    result = run(name, logprobs, response, counts(response))
    result.loss.backward()
    lengths = response.cu_seqlens.diff().tolist()
    assert logprobs.grad is not None
    if name == "grpo":
        expected = -response.advantages / 8
    elif name == "gspo":
        expected = (
            -response.advantages / 2 / torch.tensor([3.0] * 3 + [5.0] * 5, dtype=torch.float64)
        )
    else:  # each group's tokens share 1/2 of their sequence: one token and the rest
        sizes = [
            1
            if t == max(range(n), key=lambda t: response.old_entropies[start + t].item())
            else n - 1
            for start, n in zip(response.cu_seqlens.tolist(), lengths, strict=False)
            for t in range(n)
        ]
        expected = -response.advantages / 2 / 2 / torch.tensor(sizes, dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)
    assert all(
        float(result.sums[f"policy/clip_fraction_{side}"][0]) == 0.0 for side in ("low", "high")
    )


def test_gspo_is_its_sequence_form_when_advantages_are_per_sequence(packed: Packed) -> None:
    logprobs, response = packed([4, 2], spread=0.02)
    (gradient,) = torch.autograd.grad(
        run("gspo", logprobs, response, counts(response)).loss, logprobs
    )
    objective = torch.zeros((), dtype=torch.float64)
    for start, end in pairwise(response.cu_seqlens.tolist()):
        s = (logprobs - response.old_logprobs)[start:end].mean().exp()
        a = response.advantages[start]
        objective = objective + torch.minimum(s * a, s.clamp(0.95, 1.08) * a)
    (expected,) = torch.autograd.grad(-objective / 2, logprobs)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", ALL)
def test_shapes_and_denominators_are_checked(packed: Packed, name: str) -> None:
    logprobs, response = packed([3, 4])
    objective = build(name).prepare(response)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(7,\), logprobs \(6,\)"):
        objective(logprobs[:6], counts(response))
    with pytest.raises(ValueError, match=r"packed tokens \[T\]"):
        objective(logprobs[None], counts(response))
    with pytest.raises(ValueError, match=r"denominators\.(tokens|sequences)=0"):
        objective(logprobs, Denominators(sequences=0, tokens=0))


@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), spread=st.sampled_from([0.05, 2.0]))
def test_espo_s_effective_sample_size_is_a_share(
    packed: Packed, lengths: list[int], seed: int, spread: float
) -> None:
    logprobs, response = packed(lengths, seed, spread=spread)
    sums = run("espo", logprobs, response, counts(response)).sums
    mean, square = (
        float(pair[0] / pair[1])
        for pair in (sums["policy/ratio_mean"], sums["policy/ratio_square_mean"])
    )
    assert 0 < mean**2 / square <= 1 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_espo_groups_what_it_is_prepared_with_and_never_again(
    packed: Packed, dtype: torch.dtype
) -> None:
    logprobs, response = packed([3, 4], dtype=dtype)
    objective = build("espo").prepare(response)
    before = objective(logprobs, counts(response)).loss.item()
    response.old_entropies.copy_(response.old_entropies.flip(0))
    assert objective(logprobs, counts(response)).loss.item() == before
    assert run("espo", logprobs, response, counts(response)).loss.item() != before


def test_sft_is_the_mean_negative_log_likelihood(packed: Packed) -> None:
    # (1 + 2 + 0.5) / 7 tokens of the step; 3.5 / 3 nats per token of this micro-batch
    _, response = packed([2, 1])
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    result = run("sft", logprobs, response, Denominators(sequences=5, tokens=7))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 7] * 3)
    assert {name: pair.tolist() for name, pair in result.sums.items()} == {"policy/nll": [3.5, 3.0]}
    assert result.maxima == {}


def test_fractions_that_make_no_groups_are_refused_when_the_loss_is_opened() -> None:
    with pytest.raises(ValueError, match=r"fractions=\(0\.5, 0\.7\): their sum"):
        open_loss(EspoSettings(fractions=[0.5, 0.7]), shape_of(VOCABULARY))


def test_settings_of_no_loss_are_refused() -> None:
    with pytest.raises(TypeError, match="AlgoSettings: there is no loss"):
        open_loss(AlgoSettings(name="ppo"), shape_of(VOCABULARY))
