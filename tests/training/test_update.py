"""Old-policy pass and update with artificial logits: ratios, metrics, waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.config.algorithms import CorrectionSettings, GrpoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import Correction, ResponseTokens
from megatron_rl.losses.grpo import Grpo
from megatron_rl.losses.sft import Sft
from megatron_rl.mcore.optimizer import StepResult
from megatron_rl.training import old_policy, update
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.old_policy import BatchObjective, compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy

TOKENS = 5
FIELDS = ("logprobs", "rollout_logprobs", "advantages", "entropy_advantages", "weights")
WAITS = ("tolist", "item", "__float__", "__int__", "__bool__", "cpu", "numpy")


class OnDevice(torch.Tensor):
    """Records operations that would make the host wait for a GPU, also on derived tensors."""

    waits: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in WAITS:
            cls.waits.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def waits() -> Iterator[list[str]]:
    OnDevice.waits.clear()
    yield OnDevice.waits
    OnDevice.waits.clear()


class Weights:
    """A model that is its own optimizer.

    Log-probabilities come from the batch, plus `shift` for each step.
    """

    post_process = True  # it is the last pipeline stage

    def __init__(self, shift: float = 0.0) -> None:
        self.offset = 0.0
        self.shift = shift

    def zero_grad(self) -> None:
        pass

    def step(self, *, loss_is_finite: bool, max_norm: float | None = None) -> StepResult:
        self.offset += self.shift
        return StepResult(is_applied=loss_is_finite, grad_norm=1.0, lr=0.1)


def make_batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(count)
    return [
        SimpleNamespace(
            inputs=None,
            logprobs=torch.randn(TOKENS, generator=generator).as_subclass(OnDevice),
            rollout_logprobs=torch.randn(TOKENS, generator=generator).as_subclass(OnDevice),
            advantages=torch.ones(TOKENS).as_subclass(OnDevice),
            entropy_advantages=torch.zeros(TOKENS).as_subclass(OnDevice),
            weights=torch.ones(TOKENS).as_subclass(OnDevice),
            cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        )
        for _ in range(count)
    ]


def _run_in_order(models: Any, batches: Sequence[Any], on_logits: Any, **_: Any) -> list[Any]:
    """Run a schedule without a pipeline."""
    return [on_logits(torch.zeros(1), index)[1] for index in range(len(batches))]


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A policy whose micro-batches run one after the other, with logits that do not matter."""

    weights = Weights(shift=0.25)
    monkeypatch.setattr(old_policy, "run_schedule", _run_in_order)
    monkeypatch.setattr(update, "run_schedule", _run_in_order)

    def logprobs(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.logprobs + weights.offset, torch.full_like(batch.logprobs, 0.5)

    models: Any = [weights]
    functions: Any = logprobs
    return Policy(models, functions, loss=Grpo(GrpoSettings()), replay=None)


def train(
    policy: Policy,
    batches: list[Any],
    objectives: Sequence[BatchObjective],
    metrics: MetricSums,
    first_step: bool = True,
    **options: Any,
) -> None:
    counts = Denominators(sequences=len(batches), tokens=TOKENS * len(batches))
    update_policy(
        policy,
        policy.models[0],  # type: ignore[arg-type]
        batches,
        objectives,
        counts,
        dp_size=1,
        first_step=first_step,
        metrics=metrics,
        **options,
    )


def test_the_first_optimizer_step_measures_the_noise_of_its_ratios(policy: Policy) -> None:
    """Both passes use the same weights, so ratios other than 1 are arithmetic noise."""
    batches = make_batches(3)
    metrics = MetricSums()
    objectives = compute_old_policy(policy, batches, metrics)
    train(policy, batches, objectives, metrics, first_step=True)
    assert metrics.values()["policy/first_ratio_deviation"] == 0.0
    noisy = MetricSums()
    # Undo the shift of 0.25 of the first step, for one token by a little more
    batches[1].logprobs[2] -= 1e-3 + 0.25
    batches[1].logprobs[[0, 1, 3, 4]] -= 0.25
    for batch in (batches[0], batches[2]):
        batch.logprobs -= 0.25
    train(policy, batches, objectives, noisy, first_step=True)
    assert noisy.values()["policy/first_ratio_deviation"] == pytest.approx(
        -math.expm1(-1e-3), rel=1e-3
    )


def test_the_mismatch_by_age_counts_each_sampled_token_and_does_not_wait(
    policy: Policy, waits: list[str]
) -> None:
    batches = make_batches(2)
    batches[0].versions = np.array([7, 7, 5, 5, -1])
    batches[1].versions = np.array([7, 5, 5, 5, 6])
    metrics = MetricSums()
    compute_old_policy(policy, batches, metrics, version=7)
    assert not waits
    values = metrics.values()
    difference = torch.cat([b.logprobs - b.rollout_logprobs for b in batches]).as_subclass(
        torch.Tensor
    )
    places_by_age = {0: [0, 1, 5], 1: [9], 2: [2, 3, 6, 7, 8]}
    for age, places in places_by_age.items():
        size = float(difference[places].abs().mean())
        name = f"mismatch/age/{age}/logprob_abs_mean"
        assert values[name] == pytest.approx(size, rel=1e-6)
        assert f"mismatch/age/{age}/k3_kl" in values
    assert len([name for name in values if name.startswith("mismatch/age/")]) == 6
    without = MetricSums()
    compute_old_policy(policy, batches, without)
    assert not [name for name in without.values() if name.startswith("mismatch/age/")]


def test_later_optimizer_steps_do_not_measure_the_noise(policy: Policy) -> None:
    batches = make_batches(2)
    metrics = MetricSums()
    objectives = compute_old_policy(policy, batches, metrics)
    train(policy, batches, objectives, metrics, first_step=True)
    train(policy, batches, objectives, metrics, first_step=False)
    values = metrics.values()
    assert values["policy/first_ratio_deviation"] == 0.0
    assert values["policy/ratio_max"] == pytest.approx(math.exp(0.25)), (
        "the second step's weights have moved"
    )


def test_a_filler_has_no_ratios(policy: Policy) -> None:
    (batch,) = make_batches(1)
    metrics = MetricSums()
    empty = {name: getattr(batch, name)[:0] for name in FIELDS}
    filler = SimpleNamespace(inputs=None, cu_seqlens=torch.tensor([0], dtype=torch.int32), **empty)
    objectives = compute_old_policy(policy, [filler], metrics)  # type: ignore[list-item]
    train(policy, [filler], objectives, metrics, first_step=True)
    assert "policy/first_ratio_deviation" not in metrics.values()


def test_metrics_do_not_wait_for_the_gpu_in_each_micro_batch(
    policy: Policy, waits: list[str]
) -> None:
    """The host waits twice for an optimizer step: for the loss, and for all metrics together."""
    counts = {}
    for count in (2, 7):
        batches = make_batches(count)
        metrics = MetricSums()
        waits.clear()
        objectives = compute_old_policy(policy, batches, metrics)
        assert waits == []
        train(policy, batches, objectives, metrics, first_step=True)
        metrics.to_bytes()
        counts[count] = len(waits)
    assert counts[2] == counts[7] <= 2


def supervised(policy: Policy, dtype: torch.dtype) -> Policy:
    def logprobs(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = batch.logprobs.to(dtype).float()
        return values.requires_grad_(), torch.full_like(values, 0.5)

    functions: Any = logprobs
    return replace(policy, loss=Sft(), logprobs=functions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supervised_training_runs_no_old_policy_pass(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Its loss reads no old policy. Samples get the values of the policy that trains."""
    policy = supervised(policy, dtype)
    batches = make_batches(3)
    monkeypatch.setattr(old_policy, "run_schedule", lambda *_, **__: pytest.fail("there is a pass"))
    objectives = compute_old_policy(policy, batches, MetricSums())
    metrics = MetricSums()
    train(policy, batches, objectives, metrics)
    assert "policy/first_ratio_deviation" not in metrics.values()
    for batch, objective in zip(batches, objectives, strict=True):
        assert torch.equal(objective.old_logprobs, batch.logprobs.to(dtype).float())
        assert torch.equal(objective.response.old_entropies, torch.full((TOKENS,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supervised_metrics_need_no_old_policy_pass(policy: Policy, dtype: torch.dtype) -> None:
    """With replay a pass records the routes."""
    policy = supervised(policy, dtype)
    replay: Any = SimpleNamespace(old_policy_routing="record", has_faults=False)
    values = []
    for one in (policy, replace(policy, replay=replay)):
        batches = make_batches(3)
        metrics = MetricSums()
        train(one, batches, compute_old_policy(one, batches, metrics), metrics)
        values.append(metrics.values())
    for name in ("policy/nll", "policy/entropy", "train/loss"):
        assert values[0][name] == values[1][name]
    assert "policy/first_ratio_deviation" in values[1]


def test_metrics_of_micro_batches_are_those_of_all_tokens(policy: Policy) -> None:
    batches = make_batches(4)
    metrics = MetricSums()
    compute_old_policy(policy, batches, metrics)
    differences = torch.cat([(b.logprobs - b.rollout_logprobs) for b in batches]).as_subclass(
        torch.Tensor
    )
    values = MetricSums.from_bytes(metrics.to_bytes()).values()
    assert values["mismatch/logprob_abs_mean"] == pytest.approx(float(differences.abs().mean()))
    assert values["policy/entropy"] == pytest.approx(0.5)


def test_correction_weights_reach_the_loss_and_are_always_reported(
    policy: Policy,
) -> None:
    batches = make_batches(2)
    ratio = torch.cat([(b.logprobs - b.rollout_logprobs).exp() for b in batches]).as_subclass(
        torch.Tensor
    )
    capped_ratio = ratio.clamp(max=2.0)
    metrics_of = {}
    for kind in ("off", "tis"):
        responses: list[ResponseTokens] = []
        loss = SimpleNamespace(prepare=responses.append)
        settings: Any = CorrectionSettings(kind=kind)  # type: ignore[arg-type]
        metrics = MetricSums()
        changes: dict[str, Any] = {"loss": loss, "correction": Correction(settings)}
        compute_old_policy(replace(policy, **changes), batches, metrics)
        advantages = torch.cat([p.advantages for p in responses]).as_subclass(torch.Tensor)
        torch.testing.assert_close(
            advantages, capped_ratio if kind == "tis" else torch.ones(2 * TOKENS)
        )
        metrics_of[kind] = metrics.values()
    assert metrics_of["off"] == metrics_of["tis"]
    assert metrics_of["off"]["mismatch/tis_weight_mean"] == pytest.approx(
        float(capped_ratio.mean())
    )
    assert (
        0
        < metrics_of["off"]["mismatch/tis_truncated"]
        == pytest.approx(float((ratio > 2).float().mean()))
    )
