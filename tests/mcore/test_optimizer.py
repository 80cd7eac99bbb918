"""Steps of the distributed optimizer and its learning-rate schedule on one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import OptimizerSettings
from tests.mcore.replayed_models import build, train_pass
from tests.support.packed_sequences import pack


def adam(models: list[Any], total_steps: int = 10, **changes: Any) -> Any:
    from megatron_rl.mcore.optimizer import DistributedAdam

    values: dict[str, Any] = {"lr": 1e-2, "clip_grad": 1e9, "warmup_steps": 0, "decay": "constant"}
    return DistributedAdam(models, OptimizerSettings(**(values | changes)), total_steps=total_steps)


def snapshot(models: list[Any]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in models[0].named_parameters()}


def step_with_gradient(
    models: list[Any], optimizer: Any, gradient: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Step with one gradient everywhere; returns the reported rate and the changes by name."""
    before = snapshot(models)
    optimizer.zero_grad()
    for parameter in models[0].parameters():
        parameter.main_grad.fill_(gradient)
    result = optimizer.step(loss_is_finite=True)
    assert result.is_applied
    return result.lr, {name: p - before[name] for name, p in snapshot(models).items()}


def save_and_load(
    models: list[Any], optimizer: Any, directory: Path, *, optimizer_steps: int
) -> None:
    """Save a checkpoint and resume from it as from one of step `optimizer_steps`."""
    from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors

    write_tensors(gather_tensors(models, optimizer), directory, torch.distributed.group.WORLD)
    load_tensors(models, optimizer, directory, optimizer_steps=optimizer_steps)


@pytest.mark.slow
def test_gradients_of_a_step_do_not_reach_the_next(megatron: Any, checkpoint: Path) -> None:
    models = build(checkpoint)[0]
    optimizer = adam(models)
    step_with_gradient(models, optimizer, 0.5)
    optimizer.zero_grad()
    assert all(not parameter.main_grad.any() for parameter in models[0].parameters())


@pytest.mark.parametrize(
    ("decay", "warmup", "total", "rates"),
    [
        ("constant", 2, 6, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("constant", 0, 2, [1.0, 1.0, 1.0]),
        ("linear", 2, 6, [0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("linear", 0, 2, [0.55, 0.1, 0.1]),
        ("linear", 3, 3, [1 / 3, 2 / 3, 1.0]),
        ("linear", 8, 4, [0.125, 0.25, 0.375, 0.5]),
        (
            "cosine",
            2,
            6,
            [
                0.5,
                1.0,
                0.1 + 0.45 * (1 + math.sqrt(0.5)),
                0.55,
                0.1 + 0.45 * (1 - math.sqrt(0.5)),
                0.1,
            ],
        ),
    ],
)
def test_reported_learning_rate_is_the_applied_one(
    megatron: Any, checkpoint: Path, decay: str, warmup: int, total: int, rates: list[float]
) -> None:
    """AdamW moves a parameter by the learning rate if all its gradients were the same."""
    models, _ = build(checkpoint)
    optimizer = adam(models, total, lr=0.1, warmup_steps=warmup, decay=decay, eps=1e-30)
    for rate in rates:
        lr, changes = step_with_gradient(models, optimizer, 1.0)
        assert lr == pytest.approx(0.1 * rate)
        for name, change in changes.items():
            assert change.mean().item() == pytest.approx(-lr, rel=1e-4), name


def test_weight_decay_scales_with_the_learning_rate_and_skips_norms(
    megatron: Any, checkpoint: Path
) -> None:
    models, _ = build(checkpoint)
    optimizer = adam(models, lr=0.1, warmup_steps=2, weight_decay=0.5)
    for rate in (0.05, 0.1):
        before = snapshot(models)
        _, changes = step_with_gradient(models, optimizer, 0.0)
        for name, change in changes.items():
            decay = before[name] * (rate * 0.5 if before[name].ndim > 1 else 0.0)
            torch.testing.assert_close(change, -decay, rtol=1e-3, atol=1e-6)


def test_schedule_resumes_from_its_state(megatron: Any, checkpoint: Path) -> None:
    models, _ = build(checkpoint)
    first, second = (adam(models, 6, warmup_steps=2, decay="linear") for _ in range(2))
    for _ in range(3):
        step_with_gradient(models, first, 1.0)
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    assert step_with_gradient(models, second, 1.0)[0] == step_with_gradient(models, first, 1.0)[0]


@pytest.mark.slow
def test_new_peak_rate_keeps_warmup_decay_and_moments(
    megatron: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """The rates are the same as with this peak rate from the start."""
    models, _ = build(checkpoint)
    optimizer = adam(models, 6, lr=0.1, warmup_steps=2, decay="linear", eps=1e-30)
    rates = []
    for step in range(6):
        if step in (1, 4):
            optimizer.set_peak_lr(0.02 if step == 1 else 0.2)
        lr, changes = step_with_gradient(models, optimizer, 1.0)
        rates.append(lr)
        assert all(c.mean().item() == pytest.approx(-lr, rel=1e-3) for c in changes.values())
    shares = [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert rates == pytest.approx(
        [0.1 * 0.5, *(0.02 * share for share in shares[1:4]), 0.2 * 0.325, 0.2 * 0.1]
    )
    # A resumed run sets the peak rate of its phase after it loaded the state.
    save_and_load(models, optimizer, tmp_path, optimizer_steps=4)
    optimizer.set_peak_lr(0.2)
    assert step_with_gradient(models, optimizer, 1.0)[0] == pytest.approx(0.2 * 0.325)


def test_adam_equals_adamw_of_torch(megatron: Any) -> None:
    from megatron_rl.mcore.adam import FusedLayoutAdam

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


@pytest.mark.slow
def test_step_reports_the_gradient_norm_before_clipping(megatron: Any, checkpoint: Path) -> None:
    models, replay = build(checkpoint)
    optimizer = adam(models, clip_grad=1e-3)
    before = snapshot(models)
    gradients = train_pass(models, replay)
    result = optimizer.step(loss_is_finite=True)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert result.is_applied
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert any(not torch.equal(p, before[name]) for name, p in snapshot(models).items())


@pytest.mark.slow
def test_learning_rate_zero_changes_nothing(megatron: Any, checkpoint: Path) -> None:
    models, replay = build(checkpoint)
    optimizer = adam(models, lr=0.0, weight_decay=0.1, warmup_steps=2, decay="cosine")
    before = snapshot(models)
    train_pass(models, replay)
    assert optimizer.step(loss_is_finite=True).is_applied
    assert all(torch.equal(p, before[name]) for name, p in snapshot(models).items())


@pytest.mark.slow
@pytest.mark.parametrize("culprit", ["loss", "nan", "inf", "-inf"])
def test_non_finite_loss_or_gradient_skips_the_step(
    megatron: Any, checkpoint: Path, culprit: str
) -> None:
    models, replay = build(checkpoint)
    optimizer = adam(models, warmup_steps=5)
    before = snapshot(models)
    train_pass(models, replay)
    if culprit != "loss":
        next(iter(models[0].parameters())).main_grad[0] = float(culprit)
    result = optimizer.step(loss_is_finite=culprit != "loss")
    assert (result.is_applied, result.lr, optimizer.scheduler.num_steps) == (False, 0.0, 0)
    assert all(torch.equal(p, before[name]) for name, p in snapshot(models).items())
    optimizer.zero_grad()
    train_pass(models, replay)
    result = optimizer.step(loss_is_finite=True)
    assert result.is_applied
    assert result.lr == pytest.approx(1e-2 / 5), "the schedule did not advance before"
    assert all(p.isfinite().all() for p in snapshot(models).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("clip_grad", "gradient", "num_entries"),
    [(1.0, 3e19, None), (0.0, 3e19, None), (0.0, 1e21, 1), (1.0, 1e21, 1)],
)
def test_finite_gradients_with_infinite_squares_skip_the_step(
    megatron: Any,
    checkpoint: Path,
    dtype: str,
    clip_grad: float,
    gradient: float,
    num_entries: int | None,
) -> None:
    """Clipping by an infinite norm would make all gradients 0, and moments would be infinite.

    num_entries: the number of large entries in a parameter; None for all entries of all.
    """
    models, _ = build(checkpoint, dtype=dtype)
    optimizer = adam(models, clip_grad=clip_grad, weight_decay=0.1)
    step_with_gradient(models, optimizer, 1.0)
    before = snapshot(models)
    optimizer.zero_grad()
    if num_entries is None:
        for parameter in models[0].parameters():
            parameter.main_grad.fill_(gradient)
    else:
        next(iter(models[0].parameters())).main_grad.view(-1)[:num_entries] = gradient
    result = optimizer.step(loss_is_finite=True)
    assert (result.is_applied, result.lr, optimizer.steps) == (False, 0.0, 1)
    assert math.isnan(result.grad_norm)
    assert all(torch.equal(p, before[name]) for name, p in snapshot(models).items())
    _, changes = step_with_gradient(models, optimizer, 1.0)
    assert all(change.any() for change in changes.values())


def test_large_gradients_with_finite_squares_are_clipped(megatron: Any, checkpoint: Path) -> None:
    models, _ = build(checkpoint)
    _, changes = step_with_gradient(models, adam(models, clip_grad=1.0), 1e15)
    assert all(change.any() for change in changes.values())


@pytest.mark.slow
@pytest.mark.parametrize("is_spike", [True, False])
def test_a_worse_verdict_of_another_rank_skips_the_step(
    megatron: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_spike: bool
) -> None:
    """The other rank finds a spike, or a number that is not finite."""
    from megatron_rl.mcore import optimizer as module

    verdicts: list[int] = []

    def join_ranks(verdict: torch.Tensor, op: Any = module.dist.ReduceOp.SUM, **_: Any) -> None:
        """Reduce with what the ranks before gave."""
        if op == module.dist.ReduceOp.MIN:
            verdicts.append(int(verdict))
            verdict.fill_(min(verdicts))

    models, replay = build(checkpoint)
    optimizer = adam(models)
    before = snapshot(models)
    train_pass(models, replay)
    monkeypatch.setattr(module.dist, "all_reduce", join_ranks)
    other_result = optimizer.step(loss_is_finite=is_spike, max_norm=1e-6)
    assert (other_result.is_applied, other_result.is_spike) == (False, is_spike)
    result = optimizer.step(loss_is_finite=True, max_norm=1e6)
    assert len(verdicts) == 2, "one reduction a step"
    assert (result.is_applied, result.is_spike) == (False, is_spike)
    assert math.isnan(result.grad_norm) is not is_spike
    assert all(torch.equal(p, before[name]) for name, p in snapshot(models).items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_above_the_limit_skips_the_step(megatron: Any, checkpoint: Path, dtype: str) -> None:
    """The next step is the same as if the optimizer had never seen the spike, bit for bit."""
    weights = []
    for has_spike in (True, False):
        models, _ = build(checkpoint, dtype=dtype)
        optimizer = adam(models, warmup_steps=5, clip_grad=1.0)
        step_with_gradient(models, optimizer, 1.0)
        before = snapshot(models)
        count = sum(parameter.numel() for parameter in models[0].parameters())
        if has_spike:
            optimizer.zero_grad()
            for parameter in models[0].parameters():
                parameter.main_grad.fill_(2.0)
            norm = 2.0 * math.sqrt(count)
            result = optimizer.step(loss_is_finite=True, max_norm=0.999 * norm)
            assert result.is_spike and (result.is_applied, result.lr) == (False, 0.0)
            assert result.grad_norm == pytest.approx(norm, rel=1e-5) and optimizer.steps == 1
            assert all(torch.equal(p, before[name]) for name, p in snapshot(models).items())
        step_with_gradient(models, optimizer, 0.5)
        weights.append(snapshot(models))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_a_norm_below_the_limit_is_applied_and_nan_is_no_spike(
    megatron: Any, checkpoint: Path
) -> None:
    models, replay = build(checkpoint)
    optimizer = adam(models)
    train_pass(models, replay)
    result = optimizer.step(loss_is_finite=True, max_norm=1e6)
    assert result.is_applied and not result.is_spike
    result = optimizer.step(loss_is_finite=False, max_norm=1e-6)
    assert not result.is_applied and not result.is_spike


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_weight_that_is_not_finite_is_found(
    megatron: Any, checkpoint: Path, value: float, dtype: str
) -> None:
    models, _ = build(checkpoint, dtype=dtype)
    optimizer = adam(models)
    assert optimizer.weights_are_finite()
    last_parameter = list(models[0].parameters())[-1]
    last_parameter.data.view(-1)[-1] = value
    assert not optimizer.weights_are_finite()


def random_params(generator: torch.Generator) -> list[torch.Tensor]:
    shapes = ((40, 33), (7,), (1000,), (3, 3))
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    params.append(torch.randn(100, generator=generator).bfloat16().requires_grad_())
    return params


def train_in_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, *, adam_w_mode: bool
) -> tuple[list[torch.Tensor], int]:
    """Take steps with chunks of some elements.

    Returns the weights and moments, and the elements of the largest temporary tensors.
    """
    from megatron_rl.mcore.adam import FusedLayoutAdam

    num_largest = 0
    divide = torch._foreach_div

    def measure_and_divide(tensors: list[torch.Tensor], divisor: float) -> Any:
        nonlocal num_largest
        num_largest = max(num_largest, sum(tensor.numel() for tensor in tensors))
        return divide(tensors, divisor)

    generator = torch.Generator().manual_seed(0)
    params = random_params(generator)
    optimizer = FusedLayoutAdam(
        params,
        lr=0.01,
        weight_decay=0.1,
        adam_w_mode=adam_w_mode,
        chunk_elements=chunk_elements,
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_div", measure_and_divide)
        for _ in range(3):
            for param in params:
                gradient = torch.randn(param.shape, generator=generator)
                param.grad = gradient.to(param.dtype)
            optimizer.step()
    moments = [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq")]
    return params + moments, num_largest


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_adam_in_chunks_is_bit_exact(
    megatron: Any, monkeypatch: pytest.MonkeyPatch, adam_w_mode: bool
) -> None:
    """The temporary tensors of a step have the size of a chunk."""
    whole_tensors, _ = train_in_chunks(monkeypatch, 10**9, adam_w_mode=adam_w_mode)
    tensors, num_largest = train_in_chunks(monkeypatch, 64, adam_w_mode=adam_w_mode)
    assert num_largest <= 64
    assert all(torch.equal(a, b) for a, b in zip(whole_tensors, tensors, strict=True))


def test_step_uses_every_setting(megatron: Any, checkpoint: Path) -> None:
    """Compare two steps with AdamW (arXiv 1711.05101) with clipping, written out here.

    All gradients of a step are equal.
    """
    models, _ = build(checkpoint)
    beta1 = 0.5
    beta2 = 0.6
    eps = 1e-3
    clip = 2.0
    rate = 0.1
    optimizer = adam(models, lr=rate, beta1=beta1, beta2=beta2, eps=eps, clip_grad=clip)
    count = sum(parameter.numel() for parameter in models[0].parameters())
    mean = square = 0.0
    for step, gradient in ((1, 1.0), (2, -0.002)):  # the second is not clipped
        norm = abs(gradient) * math.sqrt(count)
        clipped_gradient = gradient * min(1.0, clip / (norm + 1e-6))
        mean = beta1 * mean + (1 - beta1) * clipped_gradient
        square = beta2 * square + (1 - beta2) * clipped_gradient**2
        deviation = math.sqrt(square / (1 - beta2**step)) + eps
        expected_change = -rate * (mean / (1 - beta1**step)) / deviation
        _, changes = step_with_gradient(models, optimizer, gradient)
        for name, change in changes.items():
            assert change.mean().item() == pytest.approx(expected_change, rel=1e-3), name


def test_gradients_of_bfloat16_weights_are_summed_and_applied_in_float32(
    megatron: Any, checkpoint: Path
) -> None:
    """One step changes a weight of 1 by less than bfloat16 resolves, several steps by more."""
    models, _ = build(checkpoint, dtype="bfloat16")
    assert {parameter.main_grad.dtype for parameter in models[0].parameters()} == {torch.float32}
    norm = next(
        parameter for name, parameter in models[0].named_parameters() if "final_layernorm" in name
    )
    with torch.no_grad():
        norm.fill_(1.0)
    optimizer = adam(models, lr=1e-3)
    step_with_gradient(models, optimizer, 1.0)
    assert (norm == 1).all()
    for _ in range(4):
        step_with_gradient(models, optimizer, 1.0)
    assert (norm < 1).all()


def test_every_part_of_the_optimizer_is_sharded(megatron: Any, checkpoint: Path) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    models, _ = build(checkpoint)
    parts = adam(models).scheduler.optimizer.chained_optimizers
    assert parts and all(isinstance(part, DistributedOptimizer) for part in parts)


@pytest.mark.slow
def test_gradients_are_reduced_once_a_step(
    megatron: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, replay = build(checkpoint)
    calls: list[int] = []
    reduce = models[0].finish_grad_sync
    monkeypatch.setattr(
        models[0], "finish_grad_sync", lambda *a, **k: (calls.append(1), reduce(*a, **k))[1]
    )
    train_pass(models, replay)
    assert calls == [1]


def test_nan_gradient_does_not_raise(megatron: Any, checkpoint: Path) -> None:
    """Other ranks would wait for a rank that raised. All ranks agree to skip the step instead."""
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(checkpoint)
    optimizer = adam(models)
    optimizer.zero_grad()

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        return logits.sum() * float("nan"), None

    run_schedule(models, [pack((0, 1), range(3))], loss, forward_only=False, replay=replay)
    result = optimizer.step(loss_is_finite=True)
    assert not result.is_applied and math.isnan(result.grad_norm)
