"""Measures the effect of replay: an extra pass in which the routers choose the experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_rl.losses import rollout_mismatch
from megatron_rl.mcore.collectives import sum_counts
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.models.shape import ModelShape
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.policy import Policy
from megatron_rl.training.replay.log_histogram import BINS, log_counts, quantile

_TAIL_SHARE = 0.999


def measure_replay(
    policy: Policy,
    batches: Sequence[MicroBatch],
    old_logprobs: Sequence[torch.Tensor],
    shape: ModelShape,
    group: dist.ProcessGroup | None,
    metrics: MetricSums,
) -> dict[str, float]:
    """Run one forward-only pass with live routing after the replayed one (a collective).

    old_logprobs: of each micro-batch, by the replayed pass. Empty unless this rank is of the last
    pipeline stage.

    Adds means to `metrics` and returns these metrics of all ranks:

    mismatch/replayed/*, mismatch/live/*: as `rollout_mismatch`, and logprob_abs_p99.9, which 99.9 %
    of |log w| do not exceed, within 0.6 %.
    routes/disagreement/layer_N: share of rows where the router of decoder layer N (from 0) would
    have chosen other experts than the engine, with the layers before it replayed.
    routes/live_disagreement/layer_N: the same with the layers before it live.
    routes/load/layer_N/expert_E: the expert's share of the engine's routes in that layer.
    routes/load_imbalance/layer_N: the largest of these shares over their mean.
    """
    replay = policy.replay
    assert replay is not None, "the configuration's rules require replay for this measurement"
    # Read the counts of the replayed pass before the live one replaces them
    replayed_disagreement = replay.layer_disagreement()
    loads = replay.layer_load()
    live_logprobs = _run_live_pass(policy, batches, replay)
    logprobs_by_pass = {"replayed": old_logprobs, "live": live_logprobs}
    gaps = {
        name: _count_gaps(name, logprobs, batches, metrics)
        for name, logprobs in logprobs_by_pass.items()
    }
    counts = {
        "disagreement": _by_layer(replayed_disagreement, shape, 2),
        "live_disagreement": _by_layer(replay.layer_disagreement(), shape, 2),
        "load": _by_layer(loads, shape, shape.num_experts),
    }
    sums = _sum_over_ranks({**counts, **gaps}, group)
    values = {
        f"mismatch/{name}/logprob_abs_p99.9": quantile(sums[name], _TAIL_SHARE) for name in gaps
    }
    for name in ("disagreement", "live_disagreement"):
        values |= _disagreement_metrics(name, sums[name].view(-1, 2), shape)
    return values | _load_metrics(sums["load"].view(-1, shape.num_experts), shape)


def _run_live_pass(
    policy: Policy, batches: Sequence[MicroBatch], replay: RouteReplay
) -> list[torch.Tensor]:
    """Return the log-probabilities of each micro-batch with live routing."""

    def keep_logprobs(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0].detach()

    return run_schedule(
        policy.models,
        [batch.inputs for batch in batches],
        keep_logprobs,
        forward_only=True,
        replay=replay,
        routing="live",
        measure_routes=True,
    )


def _count_gaps(
    name: str, logprobs: Sequence[torch.Tensor], batches: Sequence[MicroBatch], metrics: MetricSums
) -> torch.Tensor:
    """Return the histogram of |log w|, int64 [BINS], and add means to `metrics`."""
    counts = torch.zeros(BINS, dtype=torch.int64)
    for values, batch in zip(logprobs, batches, strict=False):
        mismatch = rollout_mismatch(values, batch.rollout_logprobs)
        metrics.add(
            {key.replace("mismatch/", f"mismatch/{name}/"): pair for key, pair in mismatch.items()}
        )
        counts = counts.to(values.device) + log_counts(values - batch.rollout_logprobs)
    return counts


def _by_layer(counts: Mapping[int, Sequence[int]], shape: ModelShape, width: int) -> torch.Tensor:
    """Return int64 [MoE layers, width], with zeros for the layers of other ranks."""
    zeros = [0] * width
    return torch.tensor(
        [list(counts.get(layer, zeros)) for layer in shape.moe_layers], dtype=torch.int64
    )


def _sum_over_ranks(
    counts: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Return the flattened sums over all ranks, with one collective for all of them."""
    sums = sum_counts(torch.cat([part.flatten().cpu() for part in counts.values()]), group)
    sizes = [part.numel() for part in counts.values()]
    return dict(zip(counts, sums.split(sizes), strict=True))


def _disagreement_metrics(name: str, counts: torch.Tensor, shape: ModelShape) -> dict[str, float]:
    """counts: int64 [MoE layers, 2], the rows that differ and all rows."""
    return {
        f"routes/{name}/layer_{layer}": num_different / max(num_rows, 1)
        for layer, (num_different, num_rows) in zip(shape.moe_layers, counts.tolist(), strict=True)
    }


def _load_metrics(counts: torch.Tensor, shape: ModelShape) -> dict[str, float]:
    """counts: int64 [MoE layers, experts], the rows of each expert."""
    shares_by_layer = counts.double() / counts.sum(1, keepdim=True)
    values: dict[str, float] = {}
    for layer, shares in zip(shape.moe_layers, shares_by_layer.tolist(), strict=True):
        for expert, share in enumerate(shares):
            values[f"routes/load/layer_{layer}/expert_{expert}"] = share
        values[f"routes/load_imbalance/layer_{layer}"] = max(shares) * len(shares)
    return values
