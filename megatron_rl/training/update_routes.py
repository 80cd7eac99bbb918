"""The routes that an update replays, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import Batcher, MicroBatch


def routes_of_update(
    steps: Sequence[Sequence[MicroBatch]],
    replay: RouteReplay | None,
    batcher: Batcher,
    watch: Stopwatch,
    metrics: MetricSums,
) -> Sequence[Sequence[MicroBatch]]:
    """The micro-batches of a step with the routes that its update replays, after the old-policy
    pass.

    Measures what routes cost this rank: time/replay in seconds, of packing them and sending them to
    the device, or of keeping what the routers recorded; replay/bytes_per_token on the device, of
    the layers and rows that it holds.
    """
    if replay is None:
        return steps
    with watch.stage("replay"):
        if replay.source == "trainer":
            steps = with_routes(steps, replay.take_recorded(sum(map(len, steps))))
    watch.seconds["time/replay"] += batcher.take_route_seconds()
    routes = [
        batch.packed.routes for step in steps for batch in step if batch.packed.routes is not None
    ]
    metrics.add_mean(
        "replay/bytes_per_token", sum(r.nbytes for r in routes), sum(len(r) for r in routes)
    )
    return steps


def with_routes(
    steps: Sequence[Sequence[MicroBatch]], recorded: Sequence[torch.Tensor | None]
) -> Sequence[Sequence[MicroBatch]]:
    """The same micro-batches with routes that this rank's own routers recorded, in their order."""
    routes = iter(recorded)
    return [
        [replace(batch, packed=replace(batch.packed, routes=next(routes))) for batch in step]
        for step in steps
    ]
