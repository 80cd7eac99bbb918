"""What a CPU engine draws by a seed; that whole responses repeat is in
`tests/rollouts/test_real_engine.py`.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.cpu_shim import seeded_sampling
from sglang_bridge.cpu_shim.seeded_sampling import draw, draw_by_seed, keep_seeds, kept, uniform

# SplitMix64's first outputs from a state of 0 and of 1234567, as its authors' program prints them.
OUTPUTS = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423],
}


def integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("seed", OUTPUTS)
def test_numbers_are_those_of_splitmix64(seed: int) -> None:
    expected = [(output >> 11) / 2**53 for output in OUTPUTS[seed]]
    assert uniform(integers(seed, seed, seed), integers(0, 1, 2)).tolist() == expected


def test_tokens_are_drawn_as_often_as_they_weigh() -> None:
    weights, rows = [3.0, 0.0, 1.0, 6.0, 0.0], 200_000
    drawn = draw(
        torch.tensor(weights).expand(rows, -1), torch.arange(rows) * 7919, torch.arange(rows) % 50
    )
    counts = torch.bincount(drawn.view(-1), minlength=len(weights))
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
def test_what_has_no_weight_is_never_drawn(
    rows: list[list[float]], seed: int, number: float
) -> None:
    weights, places = torch.tensor(rows), torch.arange(len(rows))
    chosen = [draw(weights, torch.full_like(places, seed), places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            seeded_sampling,
            "uniform",
            lambda seeds, positions: torch.full((len(seeds),), number).double(),
        )
        chosen.append(draw(weights, places, places))
    assert all((weights.gather(1, index) > 0).all() for index in chosen)


def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    weights = torch.rand(40, 300, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(40) + 2**62, torch.arange(40) * 3
    together = draw(weights, seeds, positions)
    alone = [draw(weights[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(40)]
    assert torch.equal(together, torch.cat(alone)) and len(together.unique()) > 20


@pytest.mark.parametrize("row", [[float("nan"), 1.0], [0.0, 0.0], [float("inf"), 1.0]])
def test_probabilities_that_are_none_are_no_token(row: list[float]) -> None:
    with pytest.raises(ValueError, match="NaN, infinite or all zero"):
        draw(torch.tensor([[0.5, 0.5], row]), integers(1, 2), integers(0, 0))


ALL, PROBABILITIES = 2**30, [0.1, 0.4, 0.2, 0.3]


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
def test_a_request_for_the_likeliest_tokens_gets_these(
    top_k: int, top_p: float, min_p: float, tokens: list[int]
) -> None:
    limits = torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    assert kept(torch.tensor([PROBABILITIES]), *limits)[0].nonzero()[:, 0].tolist() == tokens


def test_who_asks_for_all_tokens_gets_the_same_beside_a_greedy_request() -> None:
    sampler = SimpleNamespace(
        sampling_from_probs_torch=None, top_k_top_p_min_p_sampling_from_probs_torch=None
    )
    draw_by_seed(sampler)
    probs = torch.rand(64, 300, generator=torch.Generator().manual_seed(0)).softmax(-1)
    seeds, positions = torch.arange(64) << 40, torch.arange(64)
    alone = sampler.sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions)
    top_ks, ones = torch.full((64,), ALL), torch.ones(64)
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


def test_a_batch_keeps_its_requests_seeds_and_a_request_without_one_gets_its_own() -> None:
    module = SimpleNamespace(SamplingBatchInfo=type("SamplingBatchInfo", (Info,), {}))
    keep_seeds(module)

    def seeds_of(given: Any) -> Sequence[int]:
        return module.SamplingBatchInfo.from_schedule_batch(given, 48).sampling_seed.tolist()

    without = batch(2**63 - 1, None, None)
    first = seeds_of(without)
    assert first[0] == 2**63 - 1 and first[1] != first[2]
    assert seeds_of(without) == first  # it keeps it while it is prefilled in parts or again
