"""What replay changes, measured: an extra pass with live routing over the batch, beside the
replayed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_rl.losses import rollout_mismatch
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.models.shape import ModelShape
from megatron_rl.training.collectives import sum_counts
from megatron_rl.training.log_histogram import BINS, log_counts, quantile
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.policy import Policy

_TAIL = 0.999


def measure_replay(
    policy: Policy,
    batches: Sequence[MicroBatch],
    replayed: Sequence[torch.Tensor],
    shape: ModelShape,
    group: dist.ProcessGroup | None,
    metrics: MetricSums,
) -> dict[str, float]:
    """One forward-only pass with live routing, after the replayed one (a collective).

    replayed: the old policy's log-probabilities of each micro-batch, empty but on the last pipeline
    stage. Adds means to `metrics`; returns what is known of all ranks:

    mismatch/replayed/*, mismatch/live/*: as `rollout_mismatch`, and logprob_abs_p99.9, which 99.9 %
    of |log w| do not exceed, within 0.6 %. routes/disagreement/layer_N: share of rows where the
    router of decoder layer N (from 0) would have chosen otherwise than the engine, with the layers
    before it replayed; routes/live_disagreement/layer_N: with them live.
    routes/load/layer_N/expert_E: the expert's share of what the engine routed there;
    routes/load_imbalance/layer_N: the largest of these over their mean.
    """
    replay = policy.replay
    assert replay is not None, "the configuration's rules see to it"
    before, loads = replay.layer_disagreement(), replay.layer_load()

    def keep(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0].detach()

    packed = [batch.packed for batch in batches]
    live = run_schedule(
        policy.models,
        packed,
        keep,
        forward_only=True,
        replay=replay,
        routing="live",
        measure_routes=True,
    )
    passes = {"replayed": replayed, "live": live}
    tails = {kind: _gap(kind, logprobs, batches, metrics) for kind, logprobs in passes.items()}
    counted = {
        "disagreement": _by_layer(before, shape, 2),
        "live_disagreement": _by_layer(replay.layer_disagreement(), shape, 2),
        "load": _by_layer(loads, shape, shape.num_experts),
    }
    everyones = sum_counts(
        torch.cat([part.flatten().cpu() for part in (*counted.values(), *tails.values())]), group
    )
    sizes = [part.numel() for part in (*counted.values(), *tails.values())]
    parts = dict(zip((*counted, *tails), everyones.split(sizes), strict=True))
    values = {f"mismatch/{kind}/logprob_abs_p99.9": quantile(parts[kind], _TAIL) for kind in tails}
    for name in ("disagreement", "live_disagreement"):
        pairs = parts[name].view(-1, 2).tolist()
        values |= {
            f"routes/{name}/layer_{n}": d / max(rows, 1)
            for n, (d, rows) in zip(shape.moe_layers, pairs, strict=True)
        }
    return values | _loads(parts["load"].view(-1, shape.num_experts), shape)


def _gap(
    kind: str, logprobs: Sequence[torch.Tensor], batches: Sequence[MicroBatch], metrics: MetricSums
) -> torch.Tensor:
    """int64 [BINS] of |log w|; adds means to `metrics`."""
    counts = torch.zeros(BINS, dtype=torch.int64)
    for old, batch in zip(logprobs, batches, strict=False):
        sums = rollout_mismatch(old, batch.rollout_logprobs)
        metrics.add(
            {name.replace("mismatch/", f"mismatch/{kind}/"): pair for name, pair in sums.items()}
        )
        counts = counts.to(old.device) + log_counts(old - batch.rollout_logprobs)
    return counts


def _by_layer(counts: Mapping[int, Sequence[int]], shape: ModelShape, width: int) -> torch.Tensor:
    """int64 [MoE layers, width] with this rank's layers filled in."""
    empty = [0] * width
    return torch.tensor(
        [list(counts.get(layer, empty)) for layer in shape.moe_layers], dtype=torch.int64
    )


def _loads(counts: torch.Tensor, shape: ModelShape) -> dict[str, float]:
    shares = counts.double() / counts.sum(1, keepdim=True)
    values: dict[str, float] = {}
    for layer, row in zip(shape.moe_layers, shares.tolist(), strict=True):
        values |= {
            f"routes/load/layer_{layer}/expert_{expert}": share for expert, share in enumerate(row)
        }
        values[f"routes/load_imbalance/layer_{layer}"] = max(row) * len(row)
    return values
