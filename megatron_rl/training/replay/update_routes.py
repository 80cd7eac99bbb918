"""Routes that an update replays, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import Batcher, MicroBatch


def with_update_routes(
    steps: Sequence[Sequence[MicroBatch]],
    replay: RouteReplay | None,
    batcher: Batcher,
    stopwatch: Stopwatch,
    metrics: MetricSums,
) -> Sequence[Sequence[MicroBatch]]:
    """Return the micro-batches of a step with the routes that its update replays.

    Call it after the old-policy pass, which records the routes if train.replay=trainer.

    Adds the cost of routes on this rank: time/replay, the seconds spent on packing and sending them
    to the device or on keeping recorded ones, and replay/bytes_per_token on the device, of the
    layers and rows that this rank holds.
    """
    if replay is None:
        return steps
    with stopwatch.section("replay"):
        if replay.source == "trainer":
            num_batches = sum(len(batches) for batches in steps)
            steps = with_routes(steps, replay.take_recorded_routes(num_batches))
    stopwatch.seconds["time/replay"] += batcher.take_route_seconds()
    routes = [
        batch.inputs.routes for step in steps for batch in step if batch.inputs.routes is not None
    ]
    num_bytes = sum(r.nbytes for r in routes)
    num_rows = sum(len(r) for r in routes)
    metrics.add_mean("replay/bytes_per_token", num_bytes, num_rows)
    return steps


def with_routes(
    steps: Sequence[Sequence[MicroBatch]], routes: Sequence[torch.Tensor | None]
) -> Sequence[Sequence[MicroBatch]]:
    """Return the micro-batches with other routes.

    routes: of each micro-batch, in order.
    """
    remaining = iter(routes)
    return [
        [replace(batch, inputs=replace(batch.inputs, routes=next(remaining))) for batch in step]
        for step in steps
    ]
