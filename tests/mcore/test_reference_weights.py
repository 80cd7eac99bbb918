"""The weights of reference and model are exchanged, and both stay exact."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.mcore import compat
from tests.support.failures import fails

compat.install()

from megatron_rl.config.algorithms import CispoSettings, KlSettings
from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import open_loss
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights.export import iterate_hf_weights
from megatron_rl.mcore.weights.reference import ReferenceWeights
from megatron_rl.models.families import read_shape
from megatron_rl.run.build_worker import build_worker
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.reference_policy import compute_reference_logprobs
from megatron_rl.training.replay.update_routes import with_routes
from megatron_rl.training.update import update_policy
from tests.support.batches import make_batch
from tests.support.configurations import configuration_of
from tests.support.policies import ADAM, TWO_DIGIT_ADDITION, make_batcher, make_policy


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same model with other weights."""
    directory = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(TWO_DIGIT_ADDITION, directory)
    weights = load_file(directory / "model.safetensors")
    changed_weights = {name: 1.25 * weight for name, weight in weights.items()}
    save_file(changed_weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weights_of(models: Any, shape: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iterate_hf_weights(models, shape)}


def policy_of(checkpoint: Path, dtype: str, **settings: Any) -> Any:
    algo = CispoSettings(**settings)
    return make_policy(checkpoint, ParallelSettings(), algo, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exchange_gives_the_model_the_reference_and_then_its_own_weights_back(
    megatron: Any, other: Path, dtype: str
) -> None:
    shape, policy = policy_of(TWO_DIGIT_ADDITION, dtype)
    _, other_policy = policy_of(other, dtype)
    addresses = [weight.data_ptr() for weight in policy.models[0].parameters()]
    own_weights = weights_of(policy.models, shape)
    other_weights = weights_of(other_policy.models, shape)
    weights = ReferenceWeights.read(policy.models, shape, other, key="algo.kl.reference")
    assert_equal(weights_of(policy.models, shape), own_weights)
    for _ in range(2):
        with weights.exchange():
            assert_equal(weights_of(policy.models, shape), other_weights)
        assert_equal(weights_of(policy.models, shape), own_weights)
    with pytest.raises(RuntimeError, match="in the pass"), weights.exchange():
        raise RuntimeError("in the pass")
    assert_equal(weights_of(policy.models, shape), own_weights)
    assert addresses == [weight.data_ptr() for weight in policy.models[0].parameters()]


def assert_equal(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("rollout", "bfloat16"),
        ("trainer", "float32"),
        ("off", "bfloat16"),
        pytest.param("rollout", "float32", marks=pytest.mark.nightly),
        pytest.param("trainer", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("off", "float32", marks=pytest.mark.nightly),
    ],
)
def test_reference_logprobs_are_those_of_a_model_with_its_weights(
    megatron: Any, other: Path, source: Any, dtype: str
) -> None:
    """Bit for bit, with the same routes: the engines', the trained model's, or live ones."""
    kl = KlSettings(coef=0.1, reference=str(other))
    shape, policy = with_replay(*policy_of(TWO_DIGIT_ADDITION, dtype, kl=kl), source)
    _, other_policy = with_replay(*policy_of(other, dtype), source)
    batches = make_batches(shape, megatron, source)
    if source == "trainer":
        compute_old_policy(policy, batches, MetricSums())
        batches = list(with_routes([batches], policy.replay.take_recorded_routes(2))[0])
    values = compute_reference_logprobs(policy, [batches[:1], batches[1:]])
    assert not any(value.requires_grad for value in values)
    assert len(values) == len(batches)
    assert torch.equal(torch.cat(values), torch.cat(logprobs_of(other_policy, batches)))
    difference = torch.cat(values) - torch.cat(logprobs_of(policy, batches))
    assert float(difference.abs().max()) > 0.01, "both models give the same values"
    if policy.replay is not None:
        assert policy.replay.take_faults() == ""


def make_batches(shape: Any, layout: Any, source: str) -> list[MicroBatch]:
    _, rollouts, advantages = make_batch(shape, 4)
    batcher = make_batcher(shape, ParallelSettings(), layout, replay=source == "rollout")
    return [batcher.pack(rollouts[i : i + 2], advantages[i : i + 2]) for i in (0, 2)]


def with_replay(shape: Any, policy: Policy, source: Any) -> tuple[Any, Policy]:
    replay = None if source == "off" else RouteReplay(policy.models, source)
    return shape, replace(policy, replay=replay)


def logprobs_of(policy: Policy, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Return the log-probabilities of the model's own weights, with the batches' routes."""

    def keep_logprobs(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0]

    inputs = [batch.inputs for batch in batches]
    return run_schedule(
        policy.models, inputs, keep_logprobs, forward_only=True, replay=policy.replay
    )


@pytest.mark.slow
def test_an_update_moves_towards_the_reference(megatron: Any, other: Path) -> None:
    """With advantages of 0 the penalty alone trains, and the divergence falls."""
    kl = KlSettings(coef=1.0, reference=str(other))
    shape, policy = policy_of(TWO_DIGIT_ADDITION, "float32", kl=kl)
    _, rollouts, _ = make_batch(shape, 4)
    batch = make_batcher(shape, ParallelSettings(), megatron).pack(rollouts, [0.0] * 4)
    adam = DistributedAdam(policy.models, ADAM, total_steps=9)
    counts = Denominators(sequences=4, tokens=len(batch.advantages))
    divergences = []
    for _ in range(4):
        metrics = MetricSums()
        objectives = compute_old_policy(policy, [batch], metrics)
        update_policy(
            policy,
            adam,
            [batch],
            objectives,
            counts,
            reference_logprobs=compute_reference_logprobs(policy, [[batch]]),
            dp_size=1,
            first_step=True,
            metrics=metrics,
        )
        divergences.append(metrics.values()["policy/kl_reference"])
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.8 * divergences[0]


@pytest.mark.slow
@pytest.mark.parametrize("reference", [None, "other"])
def test_a_resumed_run_keeps_the_reference_of_its_start(
    megatron: Any, other: Path, tmp_path: Path, reference: str | None
) -> None:
    """The start checkpoint, or algo.kl.reference, and never the trained weights."""
    overrides = [] if reference is None else [f"algo.kl.reference={other}"]
    c = configuration("algo.kl.coef=0.1", *overrides)
    shape = read_shape(c.model.path)
    worker = build_worker(c, shape, open_loss(c.algo, shape), megatron, tmp_path)
    start = load_file(TWO_DIGIT_ADDITION / "model.safetensors")
    assert_equal(weights_of(worker.policy.models, shape), start)
    with torch.no_grad():  # as a checkpoint of a later step would
        for weight in worker.policy.models[0].parameters():
            weight.mul_(3)
    assert worker.policy.reference is not None
    with worker.policy.reference.exchange():
        path = TWO_DIGIT_ADDITION if reference is None else other
        weights = load_file(path / "model.safetensors")
        assert_equal(weights_of(worker.policy.models, shape), weights)


def test_without_a_penalty_there_is_no_reference(megatron: Any, tmp_path: Path) -> None:
    c = configuration("algo.kl.coef=0")
    shape = read_shape(c.model.path)
    worker = build_worker(c, shape, open_loss(c.algo, shape), megatron, tmp_path)
    assert worker.policy.reference is None


def configuration(*overrides: str) -> Configuration:
    return configuration_of(["experiment=smoke", f"model.path={TWO_DIGIT_ADDITION}", *overrides])


def test_errors_in_the_reference_name_its_key(megatron: Any, other: Path, tmp_path: Path) -> None:
    shape, policy = policy_of(TWO_DIGIT_ADDITION, "float32")
    shutil.copytree(other, tmp_path / "bad")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with fails(ExitCode.BAD_DATA, match=r"algo\.kl\.reference='.*bad'.*NaN or Inf"):
        ReferenceWeights.read(policy.models, shape, tmp_path / "bad", key="algo.kl.reference")
