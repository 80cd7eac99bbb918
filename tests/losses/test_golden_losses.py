"""Losses match numbers that were computed by hand."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.algorithms import ALGORITHMS
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, ResponseTokens, open_loss
from tests.losses.shapes import shape_of

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "policy_losses.toml").read_text())
SETTINGS = ("clip_low", "clip_high", "alpha", "fractions", "min_clip")


@pytest.mark.parametrize("name", ["grpo", "gspo", "espo", "cispo"])
def test_losses_match_golden_numbers(name: str) -> None:
    golden: dict[str, Any] = GOLDEN[name]
    algo = ALGORITHMS[name](**{key: golden[key] for key in SETTINGS if key in golden})
    loss = open_loss(algo, shape_of(golden.get("vocab_size", 48)))
    response = response_of(golden)
    logprobs = (response.old_logprobs + torch.tensor(golden["log_ratios"])).requires_grad_()
    denominators = Denominators(sequences=golden["sequences"], tokens=golden["tokens"])
    result = loss.prepare(response)(logprobs, denominators)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(golden["loss"], rel=2e-6)
    gradient = torch.tensor(golden["gradient"])
    torch.testing.assert_close(logprobs.grad, gradient, rtol=2e-6, atol=1e-8)
    metrics = metrics_of(result)
    for key, value in golden["metrics"].items():
        assert metrics[key] == pytest.approx(value, rel=2e-6, abs=1e-9), key


def metrics_of(result: LossResult) -> dict[str, float]:
    means = {key: float(pair[0] / pair[1]) for key, pair in result.sums.items()}
    return means | {key: float(value) for key, value in result.maxima.items()}


def response_of(golden: dict[str, Any]) -> ResponseTokens:
    old = torch.full((len(golden["log_ratios"]),), -1.0)
    return ResponseTokens(
        old_logprobs=old,
        old_entropies=torch.tensor(golden.get("entropies", [0.5] * len(old))),
        rollout_logprobs=old,
        advantages=torch.tensor(golden["advantages"]),
        cu_seqlens=torch.tensor(golden["cu_seqlens"], dtype=torch.int32),
    )
