"""Seeded sampling of a CPU engine. `tests/rollouts/test_real_engine.py` repeats whole responses."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.cpu_shim import seeded_sampling
from sglang_bridge.cpu_shim.seeded_sampling import (
    assign_seeds,
    sample,
    sample_by_seed,
    token_mask,
    uniform,
)

# SplitMix64's first outputs from a state of 0 and of 1234567, as its authors' program prints them.
OUTPUTS = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423],
}


def integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("seed", OUTPUTS)
def test_uniform_numbers_are_those_of_splitmix64(seed: int) -> None:
    numbers = [(output >> 11) / 2**53 for output in OUTPUTS[seed]]
    assert uniform(integers(seed, seed, seed), integers(0, 1, 2)).tolist() == numbers


def test_sampling_frequencies_match_the_weights() -> None:
    weights = [3.0, 0.0, 1.0, 6.0, 0.0]
    rows = 200_000
    indices = sample(
        torch.tensor(weights).expand(rows, -1), torch.arange(rows) * 7919, torch.arange(rows) % 50
    )
    counts = torch.bincount(indices.view(-1), minlength=len(weights))
    for count, weight in zip(counts.tolist(), weights, strict=True):
        share = weight / sum(weights)
        assert abs(count - share * rows) <= 4 * (share * (1 - share) * rows) ** 0.5


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0]), min_size=4, max_size=4).filter(any),
        min_size=1,
    ),
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.0, 0.5, 1 - 2**-53]),
)
def test_tokens_without_weight_are_never_sampled(
    rows: list[list[float]], seed: int, number: float
) -> None:
    weights = torch.tensor(rows)
    places = torch.arange(len(rows))
    samples = [sample(weights, torch.full_like(places, seed), places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            seeded_sampling,
            "uniform",
            lambda seeds, positions: torch.full((len(seeds),), number).double(),
        )
        samples.append(sample(weights, places, places))
    assert all((weights.gather(1, index) > 0).all() for index in samples)


def test_row_is_sampled_alike_alone_and_in_a_batch() -> None:
    weights = torch.rand(40, 300, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(40) + 2**62
    positions = torch.arange(40) * 3
    together = sample(weights, seeds, positions)
    alone = [sample(weights[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(40)]
    assert torch.equal(together, torch.cat(alone)) and len(together.unique()) > 20


@pytest.mark.parametrize("row", [[float("nan"), 1.0], [0.0, 0.0], [float("inf"), 1.0]])
def test_invalid_probabilities_raise(row: list[float]) -> None:
    with pytest.raises(ValueError, match="NaN, infinite or all zero"):
        sample(torch.tensor([[0.5, 0.5], row]), integers(1, 2), integers(0, 0))


ALL = 2**30
PROBABILITIES = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "tokens"),
    [
        (ALL, 1.0, 0.0, [0, 1, 2, 3]),
        (1, 1.0, 0.0, [1]),
        (ALL, 0.5, 0.0, [1, 3]),
        (ALL, 1.0, 0.6, [1, 3]),
        (3, 0.95, 0.4, [1, 2, 3]),
    ],
)
def test_token_mask_keeps_the_most_likely_tokens(
    top_k: int, top_p: float, min_p: float, tokens: list[int]
) -> None:
    limits = torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    assert token_mask(torch.tensor([PROBABILITIES]), *limits)[0].nonzero()[:, 0].tolist() == tokens


def test_unlimited_request_is_unaffected_by_a_greedy_one_in_its_batch() -> None:
    sampler = SimpleNamespace(
        sampling_from_probs_torch=None, top_k_top_p_min_p_sampling_from_probs_torch=None
    )
    sample_by_seed(sampler)
    probs = torch.rand(64, 300, generator=torch.Generator().manual_seed(0)).softmax(-1)
    seeds = torch.arange(64) << 40
    positions = torch.arange(64)
    alone = sampler.sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions)
    top_ks = torch.full((64,), ALL)
    ones = torch.ones(64)
    top_ks[0] = 1
    beside = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        top_ks,
        ones,
        0 * ones,
        False,
        seeds,
        positions,
        return_filtered_probs=False,
        max_top_k=None,
    )
    assert beside[0] == probs[0].argmax() and torch.equal(alone[1:], beside[1:])


def batch(*seeds: int | None) -> Any:
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds
        ]
    )


class Info:
    sampling_seed: torch.Tensor | None = None

    @classmethod
    def from_schedule_batch(cls, batch: Any, vocab_size: int) -> "Info":
        return cls()


def test_batch_keeps_request_seeds_and_adds_missing_ones() -> None:
    module = SimpleNamespace(SamplingBatchInfo=type("SamplingBatchInfo", (Info,), {}))
    assign_seeds(module)

    def seeds_of(requests: Any) -> Sequence[int]:
        return module.SamplingBatchInfo.from_schedule_batch(requests, 48).sampling_seed.tolist()

    without = batch(2**63 - 1, None, None)
    first = seeds_of(without)
    assert first[0] == 2**63 - 1 and first[1] != first[2]
    assert seeds_of(without) == first  # also when a request is prefilled in parts or again
