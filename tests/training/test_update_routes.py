"""The routes that an update replays, and their cost, with stand-ins for batches and routers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.replay import replay_effect
from megatron_rl.training.replay.update_routes import with_update_routes


@dataclass(frozen=True)
class Inputs:
    routes: torch.Tensor | None


@dataclass(frozen=True)
class Batch:
    inputs: Inputs


def routes_of(rows: int) -> torch.Tensor:
    """Return routes [rows, 3 layers, top-2]: six bytes a row."""
    return torch.zeros(rows, 3, 2, dtype=torch.uint8)


def run(source: str, steps: list[list[Batch]]) -> tuple[list[list[Any]], dict[str, float]]:
    """Return the routes of each micro-batch by step, and the metrics."""
    recorded_routes = [routes_of(10 + index) for index in range(9)]
    replay: Any = SimpleNamespace(
        source=source, take_recorded_routes=lambda num_batches: recorded_routes[:num_batches]
    )
    batcher: Any = SimpleNamespace(take_route_seconds=lambda: 2.0)
    stopwatch = Stopwatch()
    stopwatch.seconds["time/replay"] = 3.0
    metrics = MetricSums()
    result: Any = with_update_routes(steps, replay, batcher, stopwatch, metrics)
    routes = [[batch.inputs.routes for batch in step] for step in result]
    return routes, metrics.values() | stopwatch.seconds


def test_the_trainers_routes_are_given_to_the_micro_batches_in_order() -> None:
    steps = [[Batch(Inputs(None)), Batch(Inputs(None))], [Batch(Inputs(None))]]
    routes, metrics = run("trainer", steps)
    assert [[len(part) for part in step] for step in routes] == [[10, 11], [12]]
    assert metrics["replay/bytes_per_token"] == 6.0


def test_the_engines_routes_stay() -> None:
    steps = [[Batch(Inputs(routes_of(4)))], [Batch(Inputs(routes_of(5))), Batch(Inputs(None))]]
    routes, metrics = run("rollout", steps)
    assert routes == [[batch.inputs.routes for batch in step] for step in steps]
    assert metrics["replay/bytes_per_token"] == 6.0


def test_the_time_of_routes_adds_up() -> None:
    _, metrics = run("rollout", [[Batch(Inputs(routes_of(4)))]])
    assert metrics["time/replay"] == pytest.approx(5.0, abs=0.5)


def test_measurements_are_summed_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank counts one row more of everything."""
    group: Any = object()
    num_sums = 0

    def sum_with_another_rank(counts: torch.Tensor, ranks: Any) -> torch.Tensor:
        nonlocal num_sums
        num_sums += 1
        assert ranks is group
        return 2 * counts + 1

    monkeypatch.setattr(replay_effect, "sum_counts", sum_with_another_rank)
    monkeypatch.setattr(replay_effect, "run_schedule", lambda *arguments, **options: [])
    disagreements = iter([{0: (1, 4), 2: (0, 4)}, {0: (1, 4), 2: (3, 4)}])
    replay = SimpleNamespace(
        layer_disagreement=lambda: next(disagreements),
        layer_load=lambda: {0: (3, 1), 2: (2, 2)},
    )
    policy: Any = SimpleNamespace(replay=replay, models=[])
    shape: Any = SimpleNamespace(moe_layers=(0, 2), num_experts=2)
    values = replay_effect.measure_replay(policy, [], [], shape, group, MetricSums())
    names = ("disagreement/layer_0", "live_disagreement/layer_2", "load/layer_0/expert_0")
    assert [values[f"routes/{name}"] for name in names] == [3 / 9, 7 / 9, 7 / 10]
    assert num_sums == 1, "one collective for all of them"
