"""Every loss against a plain loop over tokens in float64, and what all losses have in common."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.plan import Denominators
from megatron_rl.losses import LossResult, PolicyLoss, ResponseTokens, build_policy_loss

Packed = Callable[..., tuple[torch.Tensor, ResponseTokens]]
SETTINGS: dict[str, dict[str, float]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "espo": {"vocab_size": 48, "alpha": 0.2, "min_clip": 0.01},
}
ALL = list(SETTINGS)
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
GENERATED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def build(name: str) -> PolicyLoss:
    return build_policy_loss(name, **SETTINGS[name])


def run(name: str, logprobs: torch.Tensor, response: ResponseTokens, denominators: Denominators) -> LossResult:
    loss = build(name)
    return loss(logprobs, response, loss.groups(response), denominators)


def counts(response: ResponseTokens) -> Denominators:
    return Denominators(sequences=len(response.cu_seqlens) - 1, tokens=len(response.advantages))


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)


def token_groups(entropies: list[float]) -> list[list[int]]:
    """ESPO: the ceil(0.2 n) most uncertain tokens, ties by position, and the rest."""
    order = sorted(range(len(entropies)), key=lambda t: (-entropies[t], t))
    k = max(1, math.ceil(0.2 * len(order)))
    return [g for g in (order[:k], order[k:]) if g]


def loop(name: str, logprobs: torch.Tensor, response: ResponseTokens, denominators: Denominators) -> float:
    """The loss as its paper writes it, one token at a time, with Python floats."""
    setting = SETTINGS[name]
    total = 0.0
    for start, end in pairwise(response.cu_seqlens.tolist()):
        log_ratio = (logprobs - response.old_logprobs)[start:end].tolist()
        advantage = response.advantages[start:end].tolist()
        n = end - start
        if n == 0:
            continue
        if name == "grpo":
            total += sum(
                surrogate(math.exp(x), a, setting["clip_low"], setting["clip_high"])
                for x, a in zip(log_ratio, advantage, strict=True)
            )
        elif name == "gspo":
            s = math.exp(sum(log_ratio) / n)
            total += sum(surrogate(s, a, setting["clip_low"], setting["clip_high"]) for a in advantage) / n
        else:
            entropy = response.old_entropies[start:end].tolist()
            members = token_groups(entropy)
            for group in members:
                s = math.exp(sum(log_ratio[t] for t in group) / len(group))
                mean_entropy = sum(entropy[t] for t in group) / len(group)
                clip = max(setting["min_clip"], setting["alpha"] * mean_entropy / math.log(setting["vocab_size"]))
                total += sum(surrogate(s, advantage[t], clip, clip) for t in group) / len(group) / len(members)
    return -total / (denominators.tokens if name == "grpo" else denominators.sequences)


@pytest.mark.parametrize("name", ALL)
@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 0.05, 0.3, 2.0]))
def test_the_loss_is_what_a_loop_over_tokens_gives(
    packed: Packed, name: str, lengths: list[int], seed: int, spread: float
) -> None:
    logprobs, response = packed(lengths, seed, spread=spread)
    denominators = Denominators(sequences=7, tokens=31)
    result = run(name, logprobs, response, denominators)
    assert result.loss.item() == pytest.approx(loop(name, logprobs, response, denominators), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_the_value(packed: Packed, name: str) -> None:
    # With one advantage per sequence, the gradient through the tokens is the plain derivative of the value.
    logprobs, response = packed([3, 1, 6], seed=4, spread=0.02)
    loss = build(name)
    groups = loss.groups(response)
    assert torch.autograd.gradcheck(lambda x: loss(x, response, groups, counts(response)).loss, (logprobs,))


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
        index = torch.tensor([t for i in part for t in range(offsets[i], offsets[i + 1])], dtype=torch.int64)
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


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_looks_plausible(packed: Packed, name: str, field: str, value: float) -> None:
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


@pytest.mark.parametrize("name", ALL)
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
    assert run(name, logprobs, response, counts(response)).loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ALL)
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
        expected = -response.advantages / 2 / torch.tensor([3.0] * 3 + [5.0] * 5, dtype=torch.float64)
    else:  # each group's tokens share 1/2 of their sequence: one token and the rest
        sizes = [
            1 if t == max(range(n), key=lambda t: response.old_entropies[start + t].item()) else n - 1
            for start, n in zip(response.cu_seqlens.tolist(), lengths, strict=False)
            for t in range(n)
        ]
        expected = -response.advantages / 2 / 2 / torch.tensor(sizes, dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)
    assert all(float(result.sums[f"policy/clip_fraction_{side}"][0]) == 0.0 for side in ("low", "high"))


def test_gspo_is_its_sequence_form_when_advantages_are_per_sequence(packed: Packed) -> None:
    logprobs, response = packed([4, 2], spread=0.02)
    (gradient,) = torch.autograd.grad(run("gspo", logprobs, response, counts(response)).loss, logprobs)
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
    groups = build(name).groups(response)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(7,\), logprobs \(6,\)"):
        build(name)(logprobs[:6], response, groups, counts(response))
    with pytest.raises(ValueError, match=r"packed tokens \[T\]"):
        build(name)(logprobs[None], response, groups, counts(response))
    with pytest.raises(ValueError, match=r"denominators\.(tokens|sequences)=0"):
        build(name)(logprobs, response, groups, Denominators(sequences=0, tokens=0))


@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), spread=st.sampled_from([0.05, 2.0]))
def test_espo_s_effective_sample_size_is_a_share(packed: Packed, lengths: list[int], seed: int, spread: float) -> None:
    logprobs, response = packed(lengths, seed, spread=spread)
    sums = run("espo", logprobs, response, counts(response)).sums
    mean, square = (float(pair[0] / pair[1]) for pair in (sums["policy/ratio_mean"], sums["policy/ratio_square_mean"]))
    assert 0 < mean**2 / square <= 1 + 1e-12


def test_espo_needs_its_groups(packed: Packed) -> None:
    logprobs, response = packed([3, 4])
    with pytest.raises(TypeError, match="call groups"):
        build("espo")(logprobs, response, None, counts(response))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("ppo", {}, r"algo\.name=ppo: .*grpo, gspo, espo"),
        ("grpo", {"alpha": 0.1}, r"algo\.alpha: grpo has no such setting. It has clip_low, clip_high"),
        ("grpo", {"clip_low": 1.0}, r"algo\.clip_low=1\.0"),
        ("grpo", {"clip_low": math.nan}, r"algo\.clip_low=nan"),
        ("gspo", {"clip_high": 0.0}, r"algo\.clip_high=0\.0"),
        ("gspo", {"clip_high": math.inf}, r"algo\.clip_high=inf"),
        ("espo", {"vocab_size": 48, "fractions": [0.5, 0.7]}, "fractions"),
        ("espo", {"vocab_size": 48, "ratio_denominator": "both"}, r"algo\.ratio_denominator=both"),
    ],
)
def test_bad_settings_are_refused_when_the_loss_is_built(name: str, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_policy_loss(name, **values)
