"""Every intermediate value of `tests/golden/espo_objective.md`, from each backend that runs on CPU."""

import json
from pathlib import Path

import pytest
import torch

from espo_kernels import espo_groups, espo_policy_loss
from tests.kernels.finished import finished

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "espo_objective.json").read_text())
SEQUENCES = GOLDEN["sequences"]


def packed(name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for sequence in SEQUENCES for value in sequence[name]], dtype=dtype)


@pytest.mark.parametrize(
    ("backend", "dtype", "rtol"),
    [
        ("reference", torch.float64, 1e-9),
        ("reference", torch.float32, 1e-5),
        ("cpu", torch.float32, 1e-5),
    ],
)
def test_twelve_tokens(backend: str, dtype: torch.dtype, rtol: float) -> None:
    lengths = [len(sequence["entropies"]) for sequence in SEQUENCES]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    groups = espo_groups(
        packed("entropies", dtype),
        cu_seqlens,
        vocab_size=GOLDEN["inputs"]["vocab_size"],
        alpha=GOLDEN["inputs"]["alpha"],
        fractions=GOLDEN["inputs"]["fractions"],
        loss_mask=packed("loss_mask", torch.bool),
        backend=backend,
    )
    tokens = [token for sequence in SEQUENCES for token in sequence["tokens"]]
    assert groups.group_id.tolist() == [token["group"] for token in tokens]
    assert groups.count.tolist() == [
        [group["size"] for group in sequence["groups"]] for sequence in SEQUENCES
    ]
    widths = torch.tensor(
        [[group["epsilon"] for group in sequence["groups"]] for sequence in SEQUENCES], dtype=dtype
    )
    torch.testing.assert_close(groups.clip, widths, rtol=rtol, atol=0)

    logprobs = packed("logprobs", dtype).requires_grad_()
    advantages = torch.tensor([s["advantage"] for s in SEQUENCES], dtype=dtype).repeat_interleave(
        torch.tensor(lengths)
    )
    loss, metrics = espo_policy_loss(
        logprobs,
        packed("old_logprobs", dtype),
        advantages,
        cu_seqlens,
        groups,
        num_sequences=GOLDEN["inputs"]["num_sequences"],
        backend=backend,
    )
    loss.backward()
    torch.testing.assert_close(loss.item(), GOLDEN["loss"], rtol=rtol, atol=0)
    gradient = torch.tensor([token["loss_gradient"] for token in tokens], dtype=dtype)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=10 * rtol, atol=1e-11)

    high, low = ([sequence["groups"][tau] for sequence in SEQUENCES] for tau in (0, 1))
    assert metrics.tokens.tolist() == [3, 8]
    assert metrics.clipped_high.tolist() == [2, 0]
    assert metrics.clipped_low.tolist() == [1, 0]
    ess, values = GOLDEN["effective_sample_size"], finished(metrics)
    assert metrics.ratio_sum.tolist() == pytest.approx(ess["ratio_sum"], rel=rtol)
    assert metrics.ratio_square_sum.tolist() == pytest.approx(ess["ratio_square_sum"], rel=rtol)
    assert [values[f"ess/group{tau}"].item() for tau in (0, 1)] == pytest.approx(
        ess["by_group"], rel=rtol
    )
    assert values["ess"].item() == pytest.approx(ess["whole"], rel=rtol)
    for tau, groups_of in enumerate((high, low)):
        ratios = [group["s"] for group in groups_of]
        assert metrics.ratio_min[tau].item() == pytest.approx(min(ratios), rel=rtol)
        assert metrics.ratio_max[tau].item() == pytest.approx(max(ratios), rel=rtol)
        assert metrics.epsilon_sum[tau].item() == pytest.approx(
            sum(group["epsilon"] for group in groups_of), rel=rtol
        )
