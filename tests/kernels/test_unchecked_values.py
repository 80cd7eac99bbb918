"""`check_values=False`: bad values give NaN from every backend, without errors or stray accesses.

`test_triton_interpreted.py` runs this file once more, for the Triton kernels.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from espo_kernels import (
    EspoGroups,
    EspoResult,
    espo_groups,
    espo_policy_loss,
    token_logprob_entropy,
)
from espo_kernels.backends import checks_values
from tests.kernels.batches import ResponseBatch, response_batch

ON_GPU = torch.cuda.is_available()
BACKENDS = ["reference", "cpu"] + (
    ["triton"] if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1" else []
)
NAN = float("nan")
INF = float("inf")
LENGTHS = [4, 0, 3]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def place(backend: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """On the device the backend serves, floats as float32."""
    device = "cuda" if backend == "triton" and ON_GPU else "cpu"
    return [t.to(device, torch.float32 if t.dtype == torch.float64 else t.dtype) for t in tensors]


def logprob(
    backend: str, logits: torch.Tensor, targets: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    """logprob, entropy and the gradient of their sum, on CPU."""
    logits, targets = place(backend, logits, targets)
    leaf = logits.clone().requires_grad_()
    options = {
        "temperature": 0.7,
        "entropy_grad": True,
        "backend": backend,
        "check_values": False,
        **options,
    }
    results = token_logprob_entropy(leaf, targets, **options)
    (results[0].sum() + results[1].sum()).backward()
    assert leaf.grad is not None
    return [tensor.detach().cpu() for tensor in (*results, leaf.grad)]


def groups_of(backend: str, batch: ResponseBatch, **changes: Any) -> EspoGroups:
    arguments = {
        "entropies": batch.entropies,
        "cu_seqlens": batch.cu_seqlens,
        "loss_mask": batch.loss_mask,
    } | changes
    entropies, cu_seqlens, mask = place(
        backend, arguments["entropies"], arguments["cu_seqlens"], arguments["loss_mask"]
    )
    options = {"vocab_size": 50, "min_clip": 0.01, "fixed_clip": changes.get("fixed_clip")}
    outcome = espo_groups(
        entropies, cu_seqlens, loss_mask=mask, backend=backend, check_values=False, **options
    )
    return EspoGroups(*(tensor.cpu() for tensor in vars(outcome).values()))


def loss_of(
    backend: str,
    batch: ResponseBatch,
    groups: EspoGroups,
    denominator: str,
    num_sequences: Any = 2.0,
) -> tuple[EspoResult, torch.Tensor]:
    """The result, and the gradient on CPU."""
    tokens = place(
        backend,
        batch.logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.cu_seqlens,
        batch.loss_mask,
    )
    leaf = tokens[0].clone().requires_grad_()
    if isinstance(num_sequences, torch.Tensor):
        (num_sequences,) = place(backend, num_sequences)
    result = espo_policy_loss(
        leaf,
        *tokens[1:4],
        EspoGroups(*place(backend, *vars(groups).values())),
        loss_mask=tokens[4],
        ratio_denominator=denominator,
        num_sequences=num_sequences,
        backend=backend,
        check_values=False,
    )
    result.loss.backward()
    assert leaf.grad is not None
    return result, leaf.grad.cpu()


def batch_of(**changes: torch.Tensor) -> ResponseBatch:
    return replace(response_batch(LENGTHS, 2, mask_share=0.0), **changes)


def with_value(tensor: torch.Tensor, at: int, value: float) -> torch.Tensor:
    changes = tensor.clone()
    changes[at] = value
    return changes


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left, right) and not left.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("column", [0, 1500, 4499])
@pytest.mark.parametrize("value", [NAN, -NAN, INF])
def test_a_bad_logit_makes_its_row_nan(
    backend: str, value: float, column: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(3, 4500).to(dtype)
    targets = torch.tensor([3, 700, 4499])
    clean = logprob(backend, logits, targets)
    logits[1, column] = value
    for mine, theirs in zip(logprob(backend, logits, targets), clean, strict=True):
        assert mine[1].isnan().all()
        assert same(mine[[0, 2]], theirs[[0, 2]])


def test_a_row_without_a_finite_logit_is_nan(backend: str) -> None:
    outcome = logprob(backend, torch.full((1, 40), -INF), torch.tensor([0]))
    assert outcome[0].isnan().all() and outcome[1].isnan().all()


def test_a_row_of_one_bad_logit_has_no_finite_gradient(backend: str) -> None:
    assert logprob(backend, torch.full((1, 1), NAN), torch.tensor([0]))[2].isnan().all()


@pytest.mark.parametrize("bad", [-1, 36, 39, 40, 2**31, 2**62, -(2**63)])
def test_a_target_outside_the_vocabulary_has_no_logprob(backend: str, bad: int) -> None:
    """36 to 39 are padding columns."""
    logits = torch.randn(3, 40)
    clean = logprob(backend, logits, torch.tensor([0, 9, 35]), vocab_size=36)
    outcome = logprob(backend, logits, torch.tensor([0, bad, 35]), vocab_size=36)
    assert outcome[0][1].isnan()
    assert same(outcome[0][[0, 2]], clean[0][[0, 2]])
    assert same(outcome[1], clean[1])
    assert same(outcome[2][[0, 2]], clean[2][[0, 2]])
    assert not outcome[2][1, 36:].any()


@pytest.mark.parametrize("fixed_clip", [None, 0.2])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF])
def test_a_bad_entropy_makes_its_group_s_width_nan(
    backend: str, value: float, at: int, fixed_clip: float | None
) -> None:
    clean = groups_of(backend, batch_of(), fixed_clip=fixed_clip)
    bad = batch_of(entropies=with_value(batch_of().entropies, at, value))
    outcome = groups_of(backend, bad, fixed_clip=fixed_clip)
    lowest = int(value == -INF)
    assert outcome.clip[0].isnan().tolist() == [not lowest, bool(lowest)], (
        "where it sorts to: NaN above all"
    )
    assert outcome.group_id[at] == lowest
    assert same(outcome.clip[1:], clean.clip[1:])
    assert same(outcome.count, clean.count)
    again = groups_of(backend, bad, fixed_clip=fixed_clip)
    assert torch.equal(again.group_id, outcome.group_id)


def test_many_bad_entropies_still_make_groups_of_the_correct_size(backend: str) -> None:
    entropies = torch.where(torch.arange(7) % 3 == 2, 0.5, torch.nan)
    outcome = groups_of(backend, batch_of(entropies=entropies))
    assert outcome.count.tolist() == [[1, 3], [0, 0], [1, 2]]
    assert sorted(outcome.group_id.tolist()) == [0, 0, 1, 1, 1, 1, 1]


def test_masked_values_may_be_anything(backend: str) -> None:
    mask = torch.tensor([True, False, True, True, True, True, True])
    clean = batch_of(loss_mask=mask)
    bad = batch_of(loss_mask=mask)
    for name in ("entropies", "logprobs", "old_logprobs", "advantages"):
        bad = replace(bad, **{name: with_value(getattr(bad, name), 1, NAN)})
    reference = groups_of(backend, clean)
    outcome = groups_of(backend, bad)
    assert all(
        same(mine, theirs)
        for mine, theirs in zip(vars(outcome).values(), vars(reference).values(), strict=True)
    )
    losses = [loss_of(backend, batch, reference, "current") for batch in (clean, bad)]
    assert same(losses[0][0].loss.detach(), losses[1][0].loss.detach())
    assert same(losses[0][1], losses[1][1])


@pytest.mark.parametrize(
    "offsets", [[0, 4, 4, 6], [1, 4, 4, 7], [0, 9, 4, 7], [0, -3, 4, 7], [0, 4, 4, 10**9]]
)
def test_offsets_that_do_not_rise_to_the_tokens_give_nan(backend: str, offsets: list[int]) -> None:
    bad_groups = batch_of(cu_seqlens=torch.tensor(offsets))
    assert groups_of(backend, bad_groups).clip.isnan().any()
    result, gradient = loss_of(backend, bad_groups, groups_of(backend, batch_of()), "current")
    assert result.loss.isnan()
    assert gradient.shape == (7,)


@pytest.mark.parametrize("denominator", ["current", "old"])
def test_good_values_give_a_finite_loss(backend: str, denominator: str) -> None:
    result, gradient = loss_of(backend, batch_of(), groups_of(backend, batch_of()), denominator)
    assert result.loss.isfinite() and gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("denominator", ["current", "old"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages"])
def test_a_bad_value_makes_the_loss_nan(
    backend: str, field: str, value: float, denominator: str
) -> None:
    """The clamp of the log ratio and the clip would make plausible numbers of infinities."""
    groups = groups_of(backend, batch_of())
    bad = batch_of(**{field: with_value(getattr(batch_of(), field), 5, value)})
    assert loss_of(backend, bad, groups, denominator)[0].loss.isnan()


@pytest.mark.parametrize("denominator", ["current", "old"])
def test_bad_groups_make_the_loss_nan(backend: str, denominator: str) -> None:
    groups = groups_of(backend, batch_of())
    for width in (NAN, INF):
        clip = groups.clip.clone()
        clip[2, 1] = width
        assert loss_of(backend, batch_of(), replace(groups, clip=clip), denominator)[0].loss.isnan()
    group_id = groups.group_id.clone()
    group_id[6] = 254
    assert loss_of(backend, batch_of(), replace(groups, group_id=group_id), denominator)[
        0
    ].loss.isnan()


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
def test_a_bad_denominator_makes_the_loss_nan(backend: str, value: float) -> None:
    groups = groups_of(backend, batch_of())
    assert loss_of(backend, batch_of(), groups, "current", torch.tensor([value]))[0].loss.isnan()


def test_value_checks_can_be_enabled_and_disabled(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says."""
    monkeypatch.setenv("ESPO_KERNELS_DEBUG", "1")
    logits = torch.full((1, 4), NAN)
    targets = torch.tensor([0])
    assert logprob(backend, logits, targets)[0].isnan()
    monkeypatch.delenv("ESPO_KERNELS_DEBUG")
    with pytest.raises(ValueError, match="has NaN"):
        logprob(backend, logits, targets, check_values=True)
    elsewhere = torch.zeros(1, device="meta")
    assert checks_values(elsewhere, backend, True)
    assert not checks_values(torch.zeros(1), backend, False)
