from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.test_replay import build, train_pass


def settings(**changes: Any) -> Any:
    from megatron_rl.mcore.optimizer import AdamSettings

    values: dict[str, Any] = {
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "clip_grad": 1e9,
        "warmup_steps": 0,
        "decay_steps": 10,
        "decay": "constant",
        "min_lr_ratio": 0.1,
    }
    return AdamSettings(**(values | changes))


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1]),
    ],
)
def test_warm_up_then_decay_to_the_floor(megatron: Any, decay: str, expected: list[float]) -> None:
    from megatron_rl.mcore.optimizer import learning_rate

    chosen = settings(lr=1.0, warmup_steps=2, decay_steps=6, decay=decay)
    assert [learning_rate(chosen, step) for step in range(7)] == pytest.approx(expected)
    assert learning_rate(chosen, 1000) == pytest.approx(expected[-1])


def test_adam_is_torchs_adamw(megatron: Any) -> None:
    from megatron_rl.mcore.cpu.adam import FusedLayoutAdam

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours, theirs = ([t.clone().requires_grad_() for t in start] for _ in range(2))
    kwargs: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = [FusedLayoutAdam(ours, **kwargs), torch.optim.AdamW(theirs, **kwargs)]
    for _ in range(5):
        gradients = [torch.randn(t.shape, generator=generator) for t in start]
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient.clone()
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def snapshot(models: list[Any]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in models[0].named_parameters()}


def test_a_step_moves_parameters_and_reports_the_norm_before_clipping(megatron: Any, checkpoint: Path) -> None:
    from megatron_rl.mcore.optimizer import DistributedAdam

    models, replay = build(checkpoint)
    optimizer = DistributedAdam(models, settings(clip_grad=1e-3))
    before = snapshot(models)
    gradients = train_pass(models, replay)
    result = optimizer.step(loss_is_finite=True)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert result.stepped
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert any(not torch.equal(p, before[name]) for name, p in snapshot(models).items())


def test_learning_rate_zero_changes_nothing(megatron: Any, checkpoint: Path) -> None:
    from megatron_rl.mcore.optimizer import DistributedAdam

    models, replay = build(checkpoint)
    optimizer = DistributedAdam(models, settings(lr=0.0, weight_decay=0.1))
    before = snapshot(models)
    train_pass(models, replay)
    assert optimizer.step(loss_is_finite=True).stepped
    assert all(torch.equal(p, before[name]) for name, p in snapshot(models).items())


@pytest.mark.parametrize("poison", ["loss", "nan", "inf", "-inf"])
def test_nothing_changes_after_a_non_finite_loss_or_gradient(megatron: Any, checkpoint: Path, poison: str) -> None:
    from megatron_rl.mcore.optimizer import DistributedAdam

    models, replay = build(checkpoint)
    optimizer = DistributedAdam(models, settings())
    before = snapshot(models)
    train_pass(models, replay)
    if poison != "loss":
        next(iter(models[0].parameters())).main_grad[0] = float(poison)
    result = optimizer.step(loss_is_finite=poison != "loss")
    assert not result.stepped
    assert all(torch.equal(p, before[name]) for name, p in snapshot(models).items())
    optimizer.zero_grad()
    train_pass(models, replay)
    assert optimizer.step(loss_is_finite=True).stepped  # the optimizer itself was not poisoned
    assert all(p.isfinite().all() for p in snapshot(models).values())
