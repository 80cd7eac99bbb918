"""Metrics of what replay changes, compared with a plain computation on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.models.shape import ModelShape
from megatron_rl.training.replay.log_histogram import RESOLUTION

GRID = ParallelSettings(timeout_s=60)


class Measurement(NamedTuple):
    """The metrics of `measure_replay`, and the inputs of both passes.

    values: metrics by name.
    logprobs: of all response tokens, by pass ("replayed" and "live").
    sampled_logprobs: of all response tokens, by the engine.
    """

    values: dict[str, float]
    logprobs: dict[str, torch.Tensor]
    sampled_logprobs: torch.Tensor
    shape: ModelShape
    rollouts: list[Any]


@pytest.fixture(scope="module")
def measurement(megatron: Any, checkpoint: Path) -> Measurement:
    from megatron_rl.mcore.schedule import run_schedule
    from megatron_rl.training.metric_sums import MetricSums
    from megatron_rl.training.old_policy import compute_old_policy
    from megatron_rl.training.replay.replay_effect import measure_replay
    from tests.support.batches import make_batch
    from tests.support.policies import make_batcher, make_policy

    shape, policy = make_policy(checkpoint, GRID, GrpoSettings())
    _, rollouts, advantages = make_batch(shape, 7)
    batcher = make_batcher(shape, GRID, megatron)
    batches = [
        batcher.pack(rollouts[:4], advantages[:4]),
        batcher.pack(rollouts[4:], advantages[4:]),
    ]
    metrics = MetricSums()
    old_logprobs = [batch.old_logprobs for batch in compute_old_policy(policy, batches, metrics)]
    values = measure_replay(policy, batches, old_logprobs, shape, None, metrics)

    def live(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0].detach()

    packs = [batch.inputs for batch in batches]
    live_logprobs = run_schedule(policy.models, packs, live, forward_only=True)
    assert policy.replay is not None and policy.replay.take_faults() == ""
    return Measurement(
        values | metrics.values(),
        {"replayed": torch.cat(old_logprobs), "live": torch.cat(live_logprobs)},
        torch.cat([batch.rollout_logprobs for batch in batches]),
        shape,
        rollouts,
    )


@pytest.mark.parametrize("name", ["replayed", "live"])
def test_logprob_gaps_of_both_passes(measurement: Measurement, name: str) -> None:
    gaps = (measurement.logprobs[name] - measurement.sampled_logprobs).abs()
    values = measurement.values
    assert values[f"mismatch/{name}/logprob_abs_mean"] == pytest.approx(float(gaps.mean()))
    largest = pytest.approx(float(gaps.max()), rel=RESOLUTION)
    assert values[f"mismatch/{name}/logprob_abs_p99.9"] == largest


def test_replay_changes_the_logprobs(measurement: Measurement) -> None:
    logprobs = measurement.logprobs
    assert (logprobs["live"] - logprobs["replayed"]).abs().mean() > 0.01


def test_disagreement_of_each_layer(measurement: Measurement) -> None:
    values = measurement.values
    layers = measurement.shape.moe_layers
    assert layers == (0, 2, 3)
    by_layer = [values[f"routes/disagreement/layer_{layer}"] for layer in layers]
    assert np.mean(by_layer) == pytest.approx(values["mismatch/route_disagreement"])
    assert values["routes/live_disagreement/layer_0"] == by_layer[0], "no layer is before it"


def test_load_of_each_expert(measurement: Measurement) -> None:
    values = measurement.values
    routes = np.concatenate(
        [rollout.routes for rollout in measurement.rollouts if rollout.routes is not None]
    )
    for place, layer in enumerate(measurement.shape.moe_layers):
        shares = np.bincount(routes[:, place].ravel(), minlength=8) / routes[:, place].size
        loads = [values[f"routes/load/layer_{layer}/expert_{expert}"] for expert in range(8)]
        assert loads == pytest.approx(shares.tolist())
        imbalance = values[f"routes/load_imbalance/layer_{layer}"]
        assert imbalance == pytest.approx(8 * shares.max())
