"""Every loss equals a loop over tokens in float64. Properties that all losses share."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import (
    AlgoSettings,
    CispoSettings,
    EspoSettings,
    GrpoSettings,
    GspoSettings,
    SftSettings,
)
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, PolicyLoss, ResponseTokens, open_loss
from tests.losses.shapes import shape_of

ResponseMaker = Callable[..., tuple[torch.Tensor, ResponseTokens]]
GRPO = GrpoSettings(clip_low=0.2, clip_high=0.28)
GSPO = GspoSettings(clip_low=0.05, clip_high=0.08)
ESPO = EspoSettings(alpha=0.2, min_clip=0.01)
CISPO = CispoSettings(clip_low=0.2, clip_high=0.28)
VOCABULARY = 48
SETTINGS: dict[str, AlgoSettings] = {
    "grpo": GRPO,
    "gspo": GSPO,
    "espo": ESPO,
    "cispo": CISPO,
    "sft": SftSettings(),
}
ALL = list(SETTINGS)
RATIOS = ["grpo", "gspo", "espo", "cispo"]
TOKEN_MEANS = ("grpo", "cispo", "sft")  # the losses that are divided by tokens
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
GENERATED = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def build(name: str) -> PolicyLoss:
    return open_loss(SETTINGS[name], shape_of(VOCABULARY))


def run(
    name: str, logprobs: torch.Tensor, response: ResponseTokens, denominators: Denominators
) -> LossResult:
    return build(name).prepare(response)(logprobs, denominators)


def counts(response: ResponseTokens) -> Denominators:
    return Denominators(sequences=len(response.cu_seqlens) - 1, tokens=len(response.advantages))


class Sequence(NamedTuple):
    """Values of one sequence's tokens."""

    logprobs: list[float]
    log_ratios: list[float]
    advantages: list[float]
    entropies: list[float]


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage)


def token_groups(entropies: list[float]) -> list[list[int]]:
    """ESPO: the ceil(0.2 n) tokens with the highest entropy, ties by position, and the rest."""
    order = sorted(range(len(entropies)), key=lambda t: (-entropies[t], t))
    k = max(1, math.ceil(0.2 * len(order)))
    return [g for g in (order[:k], order[k:]) if g]


def grpo_sum(response: Sequence) -> float:
    pairs = zip(response.log_ratios, response.advantages, strict=True)
    return sum(surrogate(math.exp(x), a, GRPO.clip_low, GRPO.clip_high) for x, a in pairs)


def cispo_sum(response: Sequence) -> float:
    terms = zip(response.log_ratios, response.advantages, response.logprobs, strict=True)
    low = 1 - CISPO.clip_low
    high = 1 + CISPO.clip_high
    return sum(min(max(math.exp(x), low), high) * a * logprob for x, a, logprob in terms)


def gspo_sum(response: Sequence) -> float:
    length = len(response.log_ratios)
    ratio = math.exp(sum(response.log_ratios) / length)
    values = [surrogate(ratio, a, GSPO.clip_low, GSPO.clip_high) for a in response.advantages]
    return sum(values) / length


def espo_sum(response: Sequence) -> float:
    total = 0.0
    groups = token_groups(response.entropies)
    for group in groups:
        ratio = math.exp(sum(response.log_ratios[t] for t in group) / len(group))
        mean_entropy = sum(response.entropies[t] for t in group) / len(group)
        clip = max(ESPO.min_clip, ESPO.alpha * mean_entropy / math.log(VOCABULARY))
        values = [surrogate(ratio, response.advantages[t], clip, clip) for t in group]
        total += sum(values) / len(group) / len(groups)
    return total


SUMS: dict[str, Callable[[Sequence], float]] = {
    "grpo": grpo_sum,
    "gspo": gspo_sum,
    "espo": espo_sum,
    "cispo": cispo_sum,
    "sft": lambda response: sum(response.logprobs),
}


def loop(
    name: str, logprobs: torch.Tensor, response: ResponseTokens, denominators: Denominators
) -> float:
    """Compute the loss as its paper defines it, one token at a time, with Python floats."""
    total = 0.0
    for start, end in pairwise(response.cu_seqlens.tolist()):
        if start == end:
            continue
        window = slice(start, end)
        sequence = Sequence(
            logprobs=logprobs[window].tolist(),
            log_ratios=(logprobs - response.old_logprobs)[window].tolist(),
            advantages=response.advantages[window].tolist(),
            entropies=response.old_entropies[window].tolist(),
        )
        total += SUMS[name](sequence)
    return -total / (denominators.tokens if name in TOKEN_MEANS else denominators.sequences)


@pytest.mark.parametrize("name", ALL)
@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 0.05, 0.3, 2.0]))
def test_loss_equals_a_loop_over_tokens(
    make_response: ResponseMaker, name: str, lengths: list[int], seed: int, spread: float
) -> None:
    logprobs, response = make_response(lengths, seed, spread=spread)
    denominators = Denominators(sequences=7, tokens=31)
    result = run(name, logprobs, response, denominators)
    value = loop(name, logprobs, response, denominators)
    assert result.loss.item() == pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_sums_of_weights_of_one_give_the_same_bits_as_counts(
    make_response: ResponseMaker, name: str, dtype: torch.dtype
) -> None:
    logprobs, response = make_response([3, 5, 2], seed=3, spread=0.3)
    results = []
    for sequences, tokens in ((7, 31), (7.0, 31.0)):
        leaf = logprobs.detach().to(dtype).requires_grad_()
        result = run(name, leaf, response, Denominators(sequences=sequences, tokens=tokens))
        result.loss.backward()
        assert leaf.grad is not None
        results.append((result.loss.detach(), leaf.grad))
    (loss, gradient), (other_loss, other_gradient) = results
    assert loss.equal(other_loss) and gradient.equal(other_gradient)


@pytest.mark.parametrize("name", ["grpo", "gspo", "espo", "sft"])
def test_gradients_are_derivatives_of_the_value(make_response: ResponseMaker, name: str) -> None:
    # This holds for one advantage per sequence. It does not hold for CISPO, whose weights are
    # constants.
    logprobs, response = make_response([3, 1, 6], seed=4, spread=0.02)
    objective = build(name).prepare(response)
    assert torch.autograd.gradcheck(lambda x: objective(x, counts(response)).loss, (logprobs,))


def assert_parts_add_up(parts: list[LossResult], whole: LossResult) -> None:
    total = sum(part.loss.item() for part in parts)
    assert total == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    for key, pair in whole.sums.items():
        total_pair = torch.stack([part.sums[key].double() for part in parts]).sum(0)
        torch.testing.assert_close(total_pair, pair.double(), rtol=1e-5, atol=1e-5, msg=key)
    for key, value in whole.maxima.items():
        maximum = max(part.maxima[key].item() for part in parts if key in part.maxima)
        assert maximum == pytest.approx(value.item())


def select_sequences(
    response: ResponseTokens, sequences: list[int]
) -> tuple[torch.Tensor, ResponseTokens]:
    """Return the indices of these sequences' tokens, and a batch of these sequences."""
    offsets = response.cu_seqlens.tolist()
    token_ranges = [range(offsets[i], offsets[i + 1]) for i in sequences]
    index = torch.tensor([t for tokens in token_ranges for t in tokens], dtype=torch.int64)
    part = ResponseTokens(
        response.old_logprobs[index],
        response.old_entropies[index],
        response.rollout_logprobs[index],
        response.advantages[index],
        torch.tensor([0, *map(len, token_ranges)]).cumsum(0).int(),
    )
    return index, part


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), data=st.data())
def test_splitting_and_reordering_do_not_change_the_result(
    make_response: ResponseMaker, name: str, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    logprobs, response = make_response(lengths, seed)
    denominators = counts(response)
    whole = run(name, logprobs, response, denominators)
    (gradient,) = torch.autograd.grad(whole.loss, logprobs)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(order)))
    results = []
    for sequences in (order[:cut], order[cut:]):
        index, part = select_sequences(response, sequences)
        leaf = logprobs.detach()[index].requires_grad_()
        result = run(name, leaf, part, denominators)
        (part_gradient,) = torch.autograd.grad(result.loss, leaf)
        torch.testing.assert_close(part_gradient, gradient[index], rtol=1e-9, atol=1e-12)
        results.append(result)
    assert_parts_add_up(results, whole)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]])
def test_zero_loss_filler_has_a_graph(name: str, offsets: list[int]) -> None:
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
def test_non_finite_inputs_give_a_non_finite_result(
    make_response: ResponseMaker, name: str, field: str, value: float
) -> None:
    logprobs, response = make_response([3, 4], dtype=torch.float32)
    target = logprobs.detach().clone() if field == "logprobs" else getattr(response, field)
    target[2] = value
    if field == "logprobs":
        logprobs = target.requires_grad_()
    result = run(name, logprobs, response, counts(response))
    result.loss.backward()
    assert logprobs.grad is not None
    assert not (torch.isfinite(result.loss) and torch.isfinite(logprobs.grad).all())


def test_nan_entropies_give_a_nan_espo_loss(make_response: ResponseMaker) -> None:
    logprobs, response = make_response([3, 4], dtype=torch.float32)
    response.old_entropies[1] = math.nan
    assert math.isnan(run("espo", logprobs, response, counts(response)).loss.item())


@pytest.mark.parametrize("name", RATIOS)
def test_huge_ratios_stay_finite_and_keep_their_gradient(
    make_response: ResponseMaker, name: str
) -> None:
    logprobs, response = make_response([3, 4], dtype=torch.float32)
    distant = (logprobs.detach() + 300).requires_grad_()
    response.advantages.fill_(-1.0)
    result = run(name, distant, response, counts(response))
    result.loss.backward()
    assert distant.grad is not None
    assert torch.isfinite(result.loss)
    assert (distant.grad > 0).all(), "a negative advantage lowers the probability"


@pytest.mark.parametrize("name", ALL)
def test_float32_agrees_with_float64(make_response: ResponseMaker, name: str) -> None:
    logprobs64, response64 = make_response([5] * 40, seed=1)
    logprobs, response = make_response([5] * 40, seed=1, dtype=torch.float32)
    loss64 = run(name, logprobs64, response64, counts(response64)).loss.item()
    loss = run(name, logprobs, response, counts(response)).loss.item()
    assert loss == pytest.approx(loss64, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", RATIOS)
def test_gradient_of_an_unchanged_policy(make_response: ResponseMaker, name: str) -> None:
    _, response = make_response([3, 5])
    logprobs = response.old_logprobs.clone().requires_grad_()
    result = run(name, logprobs, response, counts(response))
    result.loss.backward()
    assert logprobs.grad is not None
    gradient = -response.advantages / denominators_of_tokens(name, response)
    torch.testing.assert_close(logprobs.grad, gradient)
    for side in ("low", "high"):
        assert float(result.sums[f"policy/clip_fraction_{side}"][0]) == 0.0


def denominators_of_tokens(name: str, response: ResponseTokens) -> torch.Tensor:
    """Return what each token's gradient is divided by, in a batch of two sequences."""
    denominators = torch.zeros_like(response.advantages)
    for start, end in pairwise(response.cu_seqlens.tolist()):
        if name in TOKEN_MEANS:
            denominators[start:end] = len(denominators)
        elif name == "gspo":
            denominators[start:end] = 2 * (end - start)
        else:
            groups = token_groups(response.old_entropies[start:end].tolist())
            for group in groups:
                denominators[[start + t for t in group]] = 2 * len(groups) * len(group)
    return denominators


@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), spread=st.sampled_from([0.05, 0.3, 2.0]))
def test_every_token_of_cispo_keeps_the_gradient_of_its_weight(
    make_response: ResponseMaker, lengths: list[int], seed: int, spread: float
) -> None:
    """Clipped tokens, too. With clip_low=1 weights have no lower limit, as in the paper."""
    logprobs, response = make_response(lengths, seed, spread=spread)
    for algo, low in ((CISPO, 0.8), (CispoSettings(clip_high=0.28), 0.0)):
        objective = open_loss(algo, shape_of(VOCABULARY)).prepare(response)
        result = objective(logprobs, Denominators(sequences=7, tokens=31))
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        weight = (logprobs.detach() - response.old_logprobs).exp().clamp(low, 1.28)
        torch.testing.assert_close(gradient, -weight * response.advantages / 31)
        assert (gradient != 0).all()


def test_gspo_equals_its_sequence_form(make_response: ResponseMaker) -> None:
    logprobs, response = make_response([4, 2], spread=0.02)
    loss = run("gspo", logprobs, response, counts(response)).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    objective = torch.zeros((), dtype=torch.float64)
    for start, end in pairwise(response.cu_seqlens.tolist()):
        s = (logprobs - response.old_logprobs)[start:end].mean().exp()
        a = response.advantages[start]
        objective = objective + torch.minimum(s * a, s.clamp(0.95, 1.08) * a)
    (sequence_gradient,) = torch.autograd.grad(-objective / 2, logprobs)
    torch.testing.assert_close(gradient, sequence_gradient)


@pytest.mark.parametrize("name", ALL)
def test_shapes_and_denominators_are_checked(make_response: ResponseMaker, name: str) -> None:
    logprobs, response = make_response([3, 4])
    objective = build(name).prepare(response)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(7,\), logprobs \(6,\)"):
        objective(logprobs[:6], counts(response))
    with pytest.raises(ValueError, match=r"packed tokens \[T\]"):
        objective(logprobs[None], counts(response))
    with pytest.raises(ValueError, match=r"denominators\.(tokens|sequences)=0"):
        objective(logprobs, Denominators(sequences=0, tokens=0))


@GENERATED
@given(lengths=LENGTHS, seed=st.integers(0, 10_000), spread=st.sampled_from([0.05, 2.0]))
def test_effective_sample_size_of_espo_is_a_share(
    make_response: ResponseMaker, lengths: list[int], seed: int, spread: float
) -> None:
    logprobs, response = make_response(lengths, seed, spread=spread)
    sums = run("espo", logprobs, response, counts(response)).sums
    mean = float(sums["policy/ratio_mean"][0] / sums["policy/ratio_mean"][1])
    square = float(sums["policy/ratio_square_mean"][0] / sums["policy/ratio_square_mean"][1])
    assert 0 < mean**2 / square <= 1 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_espo_groups_tokens_once(make_response: ResponseMaker, dtype: torch.dtype) -> None:
    logprobs, response = make_response([3, 4], dtype=dtype)
    objective = build("espo").prepare(response)
    before = objective(logprobs, counts(response)).loss.item()
    response.old_entropies.copy_(response.old_entropies.flip(0))
    assert objective(logprobs, counts(response)).loss.item() == before
    assert run("espo", logprobs, response, counts(response)).loss.item() != before


def test_sft_is_the_mean_negative_log_likelihood(make_response: ResponseMaker) -> None:
    # The loss is (1 + 2 + 0.5) / 7 tokens of the step. The metric is 3.5 / 3 nats per token.
    _, response = make_response([2, 1])
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    result = run("sft", logprobs, response, Denominators(sequences=5, tokens=7))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 7] * 3)
    assert {name: pair.tolist() for name, pair in result.sums.items()} == {"policy/nll": [3.5, 3.0]}
    assert result.maxima == {}


def test_invalid_espo_fractions_are_refused_on_opening() -> None:
    with pytest.raises(ValueError, match=r"fractions=\(0\.5, 0\.7\): their sum"):
        open_loss(EspoSettings(fractions=[0.5, 0.7]), shape_of(VOCABULARY))


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(TypeError, match="AlgoSettings: there is no loss"):
        open_loss(AlgoSettings(name="ppo"), shape_of(VOCABULARY))
