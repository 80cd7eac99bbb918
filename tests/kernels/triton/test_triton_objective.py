"""The Triton kernels of `espo_groups` and `espo_policy_loss` against the references."""

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from espo_kernels import EspoGroups, EspoResult, espo_groups, espo_policy_loss
from tests.kernels.batches import (
    ResponseBatch,
    fraction_lists,
    is_close_to_a_bound,
    ragged_lengths,
    response_batch,
    seeds,
)
from tests.kernels.metric_values import metric_values

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # the interpreter is too slow for it
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(
    batch: ResponseBatch,
    backend: str,
    fractions: tuple[float, ...],
    denominator: str,
    **options: object,
) -> tuple[EspoGroups, EspoResult, torch.Tensor]:
    on_device = ResponseBatch(
        *(
            t.to(DEVICE, torch.float32 if t.is_floating_point() else t.dtype)
            for t in vars(batch).values()
        )
    )
    groups = espo_groups(
        on_device.entropies,
        on_device.cu_seqlens,
        vocab_size=50,
        alpha=0.5,
        fractions=fractions,
        loss_mask=on_device.loss_mask,
        check_values=options.get("check_values"),
        backend=backend,
    )
    logprobs = on_device.logprobs.clone().requires_grad_()
    result = espo_policy_loss(
        logprobs,
        on_device.old_logprobs,
        on_device.advantages,
        on_device.cu_seqlens,
        groups,
        ratio_denominator=denominator,
        backend=backend,
        **options,
    )
    (result.loss * 3).backward()
    return groups, result, logprobs.grad


def assert_equal(
    mine: tuple[EspoGroups, EspoResult, torch.Tensor],
    theirs: tuple[EspoGroups, EspoResult, torch.Tensor],
) -> None:
    assert torch.equal(mine[0].group_id, theirs[0].group_id)
    assert torch.equal(mine[0].count, theirs[0].count)
    torch.testing.assert_close(mine[0].clip, theirs[0].clip, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(mine[1].loss, theirs[1].loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine[2], theirs[2], rtol=1e-5, atol=1e-6)
    for name, value in metric_values(theirs[1].metrics).items():
        torch.testing.assert_close(
            metric_values(mine[1].metrics)[name], value, rtol=1e-5, atol=1e-6, equal_nan=True
        )


@settings(max_examples=8, deadline=None, phases=NO_SHRINKING)
@given(ragged_lengths, seeds, fraction_lists, st.sampled_from(["current", "old"]), st.booleans())
def test_equals_the_reference(
    lengths: list[int],
    seed: int,
    fractions: tuple[float, ...],
    denominator: str,
    coarse_entropies: bool,
) -> None:
    batch = response_batch(lengths[:3], seed, coarse_entropies=coarse_entropies)
    reference = run(batch, "reference", fractions, denominator)
    assume(not is_close_to_a_bound(batch, reference[0], denominator))
    assert_equal(run(batch, "triton", fractions, denominator), reference)


@settings(max_examples=4, deadline=None, phases=NO_SHRINKING)
@given(st.lists(st.floats(0.01, 0.24), min_size=3, max_size=4), seeds)
def test_arbitrary_fractions_make_the_same_groups(fractions: list[float], seed: int) -> None:
    batch = response_batch([40, 7], seed)
    outputs = [
        espo_groups(
            batch.entropies.float().to(DEVICE),
            batch.cu_seqlens.to(DEVICE),
            vocab_size=9,
            fractions=fractions,
            backend=backend,
        )
        for backend in ("triton", "reference")
    ]
    assert torch.equal(outputs[0].group_id, outputs[1].group_id)


@pytest.mark.parametrize("num_sequences", [None, 7, "tensor"])
def test_several_blocks_and_each_kind_of_denominator(num_sequences: object) -> None:
    """9,000 tokens are three blocks, with ties at the edge in all of them."""
    batch = response_batch([9000, 0, 3], 1, coarse_entropies=True)
    options = {
        "num_sequences": torch.tensor([5], device=DEVICE)
        if num_sequences == "tensor"
        else num_sequences
    }
    mine = run(batch, "triton", (0.2,), "current", **options)
    assert_equal(mine, run(batch, "reference", (0.2,), "current", **options))
    again = run(batch, "triton", (0.2,), "current", **options)
    assert torch.equal(mine[1].loss, again[1].loss)
    assert torch.equal(mine[2], again[2])


def assert_groups_equal(
    entropies: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None
) -> None:
    results = [
        espo_groups(
            entropies.to(DEVICE),
            cu_seqlens.to(DEVICE),
            vocab_size=9,
            loss_mask=None if mask is None else mask.to(DEVICE),
            check_values=False,
            backend=backend,
        )
        for backend in ("triton", "triton", "reference")
    ]
    first, again, reference = results
    assert torch.equal(first.group_id, reference.group_id)
    assert torch.equal(first.count, reference.count)
    torch.testing.assert_close(first.clip, reference.clip, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert torch.equal(again.clip.nan_to_num(-1.0), first.clip.nan_to_num(-1.0))
    assert torch.equal(again.group_id, first.group_id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_of_one_long_sequence(dtype: torch.dtype) -> None:
    """16 parts, with ties of the edge in all of them."""
    entropies = (torch.rand(32_768) ** 4 * 12).round(decimals=1).to(dtype)
    assert_groups_equal(entropies, torch.tensor([0, 32_768]), None)


def test_groups_of_many_short_sequences() -> None:
    lengths = torch.tensor([1, 2, 3, 5] * (300 if DEVICE.type == "cuda" else 4))
    entropies = torch.rand(int(lengths.sum())) ** 4
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    assert_groups_equal(entropies, cu_seqlens, None)


def test_groups_of_masked_and_bad_entropies_in_several_parts() -> None:
    entropies = torch.randn(6000).round(decimals=1)
    entropies[::7] = torch.nan
    entropies[3::11] = -torch.inf
    mask = torch.rand(6000) > 0.3
    mask[4096:5000] = False
    assert_groups_equal(entropies, torch.tensor([0, 5000, 5001, 6000]), mask)


@pytest.mark.parametrize("offsets", [[1, 4, 4, 6], [0, 9, 4, 7], [0, -3, 4, 7], [0, 5, 3, 7]])
def test_every_token_is_written_whatever_cu_seqlens_holds(
    offsets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens before the first bound, after the last one, and between wrong ones."""
    empty = torch.empty

    def filled(*shape: object, **options: object) -> torch.Tensor:
        return empty(*shape, **options).fill_(77)

    monkeypatch.setattr(torch, "empty", filled)
    batch = response_batch([4, 0, 3], 2, mask_share=0.0)
    batch = ResponseBatch(**{**vars(batch), "cu_seqlens": torch.tensor(offsets)})
    groups, result, gradient = run(
        batch, "triton", (0.2,), "current", check_values=False, num_sequences=2.0
    )
    assert groups.clip.isnan().all() and result.loss.isnan()
    assert groups.group_id.tolist() == [255] * 7
    assert gradient.tolist() == [0.0] * 7


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_batch_without_signal_has_zero_loss(lengths: list[int]) -> None:
    batch = response_batch(lengths, 0)
    _, result, gradient = run(batch, "triton", (0.2,), "current")
    assert result.loss.item() == 0
    assert gradient.numel() == 0


def test_strided_inputs_are_read_correctly() -> None:
    batch = response_batch([6, 5], 8)
    strided_batch = ResponseBatch(
        *(torch.stack([t, t], dim=-1)[..., 0] for t in vars(batch).values())
    )
    assert_equal(
        run(strided_batch, "triton", (0.2,), "current"), run(batch, "reference", (0.2,), "current")
    )
