"""Simulates what the order of responses and the binding of groups to nodes bring on clusters."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, stdev
from typing import NamedTuple

from megatron_rl.config.schema import RolloutSettings
from tests.lab.run_time.clusters import SPEED, SYNC_SECONDS, Scenario
from tests.lab.run_time.simulation.cluster import Machines
from tests.lab.run_time.simulation.lengths import Knowledge
from tests.lab.run_time.simulation.run import TrainerSpeed, simulate

# Responses of a step for each place in an engine
WAVES = (2, 4)


class Way(NamedTuple):
    """A way to give responses to engines: without knowledge, in the order of the prompts."""

    knowledge: Knowledge
    binds_late: bool


BASELINE = Way("nothing", binds_late=False)
WAYS = (
    Way("nothing", binds_late=True),
    Way("history", binds_late=False),
    Way("history", binds_late=True),
    Way("truth", binds_late=True),
)


def order_table(scenario: Scenario) -> Iterator[str]:
    """Yield the speed-up of a step by each way over submission with early binding."""
    columns = [f"{way.knowledge}, {'late' if way.binds_late else 'early'}" for way in WAYS]
    yield "| engines of a node | waves | spread | " + " | ".join(columns) + " |"
    yield "|---" * (3 + len(WAYS)) + "|"
    for node_engines in (1, scenario.engines):
        for waves in WAVES:
            for spread in scenario.spreads:
                ratios = [_speed_ups(scenario, way, waves, spread, node_engines) for way in WAYS]
                cells = [str(node_engines), str(waves), f"{spread:g}", *map(_cell, ratios)]
                yield "| " + " | ".join(cells) + " |"


def _speed_ups(
    scenario: Scenario, way: Way, waves: int, spread: float, node_engines: int
) -> list[float]:
    return [
        _seconds(scenario, BASELINE, waves, spread, node_engines, seed)
        / _seconds(scenario, way, waves, spread, node_engines, seed)
        for seed in range(scenario.seeds)
    ]


def _seconds(
    scenario: Scenario, way: Way, waves: int, spread: float, node_engines: int, seed: int
) -> float:
    """Return the seconds of a step without training. Nothing is sampled ahead."""
    places = scenario.engines * scenario.max_running
    prompts = waves * places // scenario.samples
    lengths = scenario.lengths(spread, seed, prompts=prompts, knowledge=way.knowledge)
    machines = Machines(
        speed=SPEED,
        engines=scenario.engines,
        node_engines=node_engines,
        max_running=scenario.max_running,
        binds_late=way.binds_late,
    )
    settings = RolloutSettings(max_new_tokens=scenario.cap)
    run = simulate(settings, lengths, machines, TrainerSpeed(sync=SYNC_SECONDS), num_steps=4)
    return run.seconds_a_step(first=1, last=4)


def _cell(values: list[float]) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{fmean(values):.2f} ± {error:.2f}"
