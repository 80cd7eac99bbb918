"""Old-policy pass and update over made-up logits: what they compare, what they measure and what
they never wait for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.config.algorithms import CorrectionSettings, GrpoSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import Correction, ResponseTokens
from megatron_rl.losses.grpo import Grpo
from megatron_rl.mcore.optimizer import StepResult
from megatron_rl.training import old_policy, update
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.old_policy import BatchObjective, compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy

TOKENS = 5
FIELDS = ("logprobs", "rollout_logprobs", "advantages", "entropy_advantages")
WAITS = ("tolist", "item", "__float__", "__int__", "__bool__", "cpu", "numpy")


class OnDevice(torch.Tensor):
    """Counts what would make the host wait for a GPU, on itself and all that is computed from it."""

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
    """The `model` and its `optimizer`: log-probabilities are those of a batch, moved by `shift` at
    each step.
    """

    def __init__(self, shift: float = 0.0) -> None:
        self.moved, self.shift = 0.0, shift

    def zero_grad(self) -> None:
        pass

    def step(self, *, loss_is_finite: bool) -> StepResult:
        self.moved += self.shift
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
            cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        )
        for _ in range(count)
    ]


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """Micro-batches run one after the other; logits do not matter."""

    def schedule(models: Any, batches: Sequence[Any], on_logits: Any, **_: Any) -> list[Any]:
        return [on_logits(torch.zeros(1), index)[1] for index in range(len(batches))]

    weights = Weights(shift=0.25)
    monkeypatch.setattr(old_policy, "run_schedule", schedule)
    monkeypatch.setattr(update, "run_schedule", schedule)

    def logprobs(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.logprobs + weights.moved, torch.full_like(batch.logprobs, 0.5)

    return Policy(models=[weights], logprobs=logprobs, loss=Grpo(GrpoSettings()), replay=None)  # type: ignore[arg-type,list-item]


def train(
    policy: Policy,
    batches: list[Any],
    objectives: Sequence[BatchObjective],
    metrics: MetricSums,
    **how: Any,
) -> None:
    counts = Denominators(sequences=len(batches), tokens=TOKENS * len(batches))
    update_policy(
        policy, policy.models[0], batches, objectives, counts, dp_size=1, metrics=metrics, **how
    )  # type: ignore[arg-type]


def test_the_first_optimizer_step_says_how_far_its_ratios_are_from_one(policy: Policy) -> None:
    """Both passes run the same weights: what is not 1 there is noise of the arithmetic, which the
    clip width meets.
    """
    batches, metrics = make_batches(3), MetricSums()
    objectives = compute_old_policy(policy, batches, metrics)
    train(policy, batches, objectives, metrics, first_step=True)
    assert metrics.values()["policy/first_ratio_deviation"] == 0.0
    noisy = MetricSums()
    batches[1].logprobs[2] -= (
        1e-3 + 0.25
    )  # the weights moved by 0.25; one token of one micro-batch by a little more
    batches[1].logprobs[[0, 1, 3, 4]] -= 0.25
    for batch in (batches[0], batches[2]):
        batch.logprobs -= 0.25
    train(policy, batches, objectives, noisy, first_step=True)
    assert noisy.values()["policy/first_ratio_deviation"] == pytest.approx(
        -math.expm1(-1e-3), rel=1e-3
    )


def test_later_optimizer_steps_do_not_say_it(policy: Policy) -> None:
    batches, metrics = make_batches(2), MetricSums()
    objectives = compute_old_policy(policy, batches, metrics)
    train(policy, batches, objectives, metrics, first_step=True)
    train(policy, batches, objectives, metrics, first_step=False)
    values = metrics.values()
    assert values["policy/first_ratio_deviation"] == 0.0
    assert values["policy/ratio_max"] == pytest.approx(math.exp(0.25)), (
        "the second step's weights have moved"
    )


def test_a_filler_has_no_ratio(policy: Policy) -> None:
    (batch,), metrics = make_batches(1), MetricSums()
    empty = {name: getattr(batch, name)[:0] for name in FIELDS}
    filler = SimpleNamespace(inputs=None, cu_seqlens=torch.tensor([0], dtype=torch.int32), **empty)
    objectives = compute_old_policy(policy, [filler], metrics)  # type: ignore[list-item]
    train(policy, [filler], objectives, metrics, first_step=True)
    assert "policy/first_ratio_deviation" not in metrics.values()


def test_metrics_make_no_micro_batch_wait_for_the_gpu(policy: Policy, waits: list[str]) -> None:
    """However many micro-batches there are, the host asks for the loss of an optimizer step and for
    all metrics.
    """
    counts = {}
    for count in (2, 7):
        batches, metrics = make_batches(count), MetricSums()
        waits.clear()
        objectives = compute_old_policy(policy, batches, metrics)
        assert waits == []
        train(policy, batches, objectives, metrics, first_step=True)
        metrics.to_bytes()
        counts[count] = len(waits)
    assert counts[2] == counts[7] <= 2


def test_metrics_are_the_same_however_they_were_summed(policy: Policy) -> None:
    batches, metrics = make_batches(4), MetricSums()
    compute_old_policy(policy, batches, metrics)
    differences = torch.cat([(b.logprobs - b.rollout_logprobs) for b in batches]).as_subclass(
        torch.Tensor
    )
    values = MetricSums.from_bytes(metrics.to_bytes()).values()
    assert values["mismatch/logprob_abs_mean"] == pytest.approx(float(differences.abs().mean()))
    assert values["policy/entropy"] == pytest.approx(0.5)


def test_the_weights_of_a_correction_reach_the_loss_and_are_reported_with_and_without_it(
    policy: Policy,
) -> None:
    batches = make_batches(2)
    ratio = torch.cat([(b.logprobs - b.rollout_logprobs).exp() for b in batches]).as_subclass(
        torch.Tensor
    )
    capped, reported = ratio.clamp(max=2.0), {}
    for kind in ("off", "tis"):
        prepared: list[ResponseTokens] = []
        loss = SimpleNamespace(prepare=prepared.append)
        correction, metrics = Correction(CorrectionSettings(kind=kind)), MetricSums()  # type: ignore[arg-type]
        compute_old_policy(replace(policy, loss=loss, correction=correction), batches, metrics)  # type: ignore[arg-type]
        advantages = torch.cat([p.advantages for p in prepared]).as_subclass(torch.Tensor)
        torch.testing.assert_close(advantages, capped if kind == "tis" else torch.ones(2 * TOKENS))
        reported[kind] = metrics.values()
    assert reported["off"] == reported["tis"]
    assert reported["off"]["mismatch/tis_weight_mean"] == pytest.approx(float(capped.mean()))
    assert (
        0
        < reported["off"]["mismatch/tis_truncated"]
        == pytest.approx(float((ratio > 2).float().mean()))
    )
