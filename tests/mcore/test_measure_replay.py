"""The numbers that tell what replay changes, against a plain computation on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.training.replay.log_histogram import RESOLUTION

GRID = ParallelSettings(timeout_s=60)


def test_both_passes_are_measured_and_each_layer_with_and_without_those_before_it(
    megatron: Any, checkpoint: Path
) -> None:
    from launch.testbed.batches import make_batch
    from launch.testbed.policies import make_batcher, make_policy
    from megatron_rl.mcore.schedule import run_schedule
    from megatron_rl.training.replay.replay_effect import measure_replay
    from megatron_rl.training.metric_sums import MetricSums
    from megatron_rl.training.old_policy import compute_old_policy

    shape, policy = make_policy(checkpoint, GRID, GrpoSettings())
    _, rollouts, advantages = make_batch(shape, 7)
    batcher = make_batcher(shape, GRID, megatron)
    batches = [
        batcher.pack(rollouts[:4], advantages[:4]),
        batcher.pack(rollouts[4:], advantages[4:]),
    ]
    metrics = MetricSums()
    prepared = compute_old_policy(policy, batches, metrics)
    values = measure_replay(
        policy, batches, [p.old_logprobs for p in prepared], shape, None, metrics
    )
    values |= metrics.values()

    def live(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0].detach()

    sampled = torch.cat([batch.rollout_logprobs for batch in batches])
    passes = {
        "replayed": torch.cat([p.old_logprobs for p in prepared]),
        "live": torch.cat(
            run_schedule(policy.models, [b.inputs for b in batches], live, forward_only=True)
        ),
    }
    for kind, logprobs in passes.items():
        gaps = (logprobs - sampled).abs()
        assert values[f"mismatch/{kind}/logprob_abs_mean"] == pytest.approx(float(gaps.mean()))
        assert values[f"mismatch/{kind}/logprob_abs_p99.9"] == pytest.approx(
            float(gaps.max()), rel=RESOLUTION
        )
    assert (passes["live"] - passes["replayed"]).abs().mean() > 0.01, "routes made no difference"

    assert shape.moe_layers == (0, 2, 3)
    by_layer = [values[f"routes/disagreement/layer_{layer}"] for layer in shape.moe_layers]
    assert np.mean(by_layer) == pytest.approx(values["mismatch/route_disagreement"])
    assert values["routes/live_disagreement/layer_0"] == by_layer[0], "nothing is before it"
    routes = np.concatenate([rollout.routes for rollout in rollouts if rollout.routes is not None])
    for place, layer in enumerate(shape.moe_layers):
        shares = np.bincount(routes[:, place].ravel(), minlength=8) / routes[:, place].size
        found = [values[f"routes/load/layer_{layer}/expert_{expert}"] for expert in range(8)]
        assert found == pytest.approx(shares.tolist())
        assert values[f"routes/load_imbalance/layer_{layer}"] == pytest.approx(8 * shares.max())
    assert policy.replay is not None and policy.replay.take_faults() == ""
