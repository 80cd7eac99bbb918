"""Every intermediate value of `tests/golden/espo_objective.md`, from each CPU backend."""

import json
from pathlib import Path

import pytest
import torch

from espo_kernels import EspoGroups, EspoResult, espo_groups, espo_policy_loss
from tests.kernels.metric_values import metric_values

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "espo_objective.json").read_text())
SEQUENCES = GOLDEN["sequences"]


def pack(name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for sequence in SEQUENCES for value in sequence[name]], dtype=dtype)


BACKENDS = pytest.mark.parametrize(
    ("backend", "dtype", "rtol"),
    [
        ("reference", torch.float64, 1e-9),
        ("reference", torch.float32, 1e-5),
        ("cpu", torch.float32, 1e-5),
    ],
)
LENGTHS = [len(sequence["entropies"]) for sequence in SEQUENCES]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
TOKENS = [token for sequence in SEQUENCES for token in sequence["tokens"]]


def golden_groups(backend: str, dtype: torch.dtype) -> EspoGroups:
    return espo_groups(
        pack("entropies", dtype),
        CU_SEQLENS,
        vocab_size=GOLDEN["inputs"]["vocab_size"],
        alpha=GOLDEN["inputs"]["alpha"],
        fractions=GOLDEN["inputs"]["fractions"],
        loss_mask=pack("loss_mask", torch.bool),
        backend=backend,
    )


def golden_loss(backend: str, dtype: torch.dtype) -> tuple[EspoResult, torch.Tensor]:
    """The loss, and the gradient of the log-probabilities."""
    logprobs = pack("logprobs", dtype).requires_grad_()
    advantages = torch.tensor([sequence["advantage"] for sequence in SEQUENCES], dtype=dtype)
    result = espo_policy_loss(
        logprobs,
        pack("old_logprobs", dtype),
        advantages.repeat_interleave(torch.tensor(LENGTHS)),
        CU_SEQLENS,
        golden_groups(backend, dtype),
        num_sequences=GOLDEN["inputs"]["num_sequences"],
        backend=backend,
    )
    result.loss.backward()
    return result, logprobs.grad


@BACKENDS
def test_groups_of_twelve_tokens_match_the_golden_values(
    backend: str, dtype: torch.dtype, rtol: float
) -> None:
    groups = golden_groups(backend, dtype)
    assert groups.group_id.tolist() == [token["group"] for token in TOKENS]
    assert groups.count.tolist() == [
        [group["size"] for group in sequence["groups"]] for sequence in SEQUENCES
    ]
    widths = [[group["epsilon"] for group in sequence["groups"]] for sequence in SEQUENCES]
    torch.testing.assert_close(groups.clip, torch.tensor(widths, dtype=dtype), rtol=rtol, atol=0)


@BACKENDS
def test_loss_and_gradient_of_twelve_tokens_match_the_golden_values(
    backend: str, dtype: torch.dtype, rtol: float
) -> None:
    result, gradient = golden_loss(backend, dtype)
    torch.testing.assert_close(result.loss.item(), GOLDEN["loss"], rtol=rtol, atol=0)
    golden_gradient = torch.tensor([token["loss_gradient"] for token in TOKENS], dtype=dtype)
    torch.testing.assert_close(gradient, golden_gradient, rtol=10 * rtol, atol=1e-11)


@BACKENDS
def test_metric_sums_of_twelve_tokens_match_the_golden_values(
    backend: str, dtype: torch.dtype, rtol: float
) -> None:
    metrics = golden_loss(backend, dtype)[0].metrics
    assert metrics.tokens.tolist() == [3, 8]
    assert metrics.clipped_high.tolist() == [2, 0]
    assert metrics.clipped_low.tolist() == [1, 0]
    ess = GOLDEN["effective_sample_size"]
    values = metric_values(metrics)
    assert metrics.ratio_sum.tolist() == pytest.approx(ess["ratio_sum"], rel=rtol)
    assert metrics.ratio_square_sum.tolist() == pytest.approx(ess["ratio_square_sum"], rel=rtol)
    by_group = [values[f"ess/group{tau}"].item() for tau in (0, 1)]
    assert by_group == pytest.approx(ess["by_group"], rel=rtol)
    assert values["ess"].item() == pytest.approx(ess["whole"], rel=rtol)


@BACKENDS
@pytest.mark.parametrize("tau", [0, 1])
def test_metric_extremes_of_twelve_tokens_match_the_golden_values(
    backend: str, dtype: torch.dtype, rtol: float, tau: int
) -> None:
    metrics = golden_loss(backend, dtype)[0].metrics
    groups = [sequence["groups"][tau] for sequence in SEQUENCES]
    ratios = [group["s"] for group in groups]
    widths = [group["epsilon"] for group in groups]
    assert metrics.ratio_min[tau].item() == pytest.approx(min(ratios), rel=rtol)
    assert metrics.ratio_max[tau].item() == pytest.approx(max(ratios), rel=rtol)
    assert metrics.epsilon_sum[tau].item() == pytest.approx(sum(widths), rel=rtol)
