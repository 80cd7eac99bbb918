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
