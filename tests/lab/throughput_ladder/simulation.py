"""Simulates the rungs of the ladder, with times of engines and scorers that are measured apart.

The times come from steps of calibration, whose responses all have the same length. No rung is
among them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.lab.run_time.fit import fit_speed
from tests.lab.run_time.simulation import engine as simulation
from tests.lab.run_time.simulation.cluster import Cluster, Group, Machines
from tests.lab.run_time.simulation.engine import EngineSpeed
from tests.lab.throughput_ladder.rungs import BASELINE, NUM_ENGINES, Rung, expected_tokens
from tests.lab.throughput_ladder.workload import PROMPT_TOKENS, Response

# Responses of a step of calibration for each that runs at a time, and the length of them all
CALIBRATIONS = ((0.0, 200), (0.5, 100), (1.0, 20), (1.0, 100), (1.0, 300), (3.0, 40))


@dataclass(frozen=True)
class Calibration:
    """A step whose responses all have the same length. seconds: until the last response."""

    responses: Sequence[Response]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Engines, scorers and cores that a step has.

    call: seconds of the processor that a scorer takes for a response. scorers: their number. cores:
    that engines and scorers share.
    """

    speed: EngineSpeed
    max_running: int
    call: float
    scorers: int
    cores: int


def calibration_responses(max_running: int) -> Iterator[list[Response]]:
    """Yield the responses of each step of calibration, which all engines get at the same time."""
    for waves, length in CALIBRATIONS:
        number = NUM_ENGINES * max(1, round(waves * max_running))
        yield [
            Response(
                prompt=index,
                sample=0,
                token_ids=[3 + (index + place) % 8 for place in range(PROMPT_TOKENS)],
                length=length,
                history=length,
            )
            for index in range(number)
        ]


def fit_engines(calibrations: Sequence[Calibration], max_running: int) -> EngineSpeed:
    """Return the seconds of forward passes with which these steps take as long as they did."""

    def residuals(speed: EngineSpeed) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        parts = Parts(speed=speed, max_running=max_running, call=0.0, scorers=1, cores=NUM_ENGINES)
        seconds = [step_seconds(BASELINE, item.responses, parts) for item in calibrations]
        measured_seconds = [item.seconds for item in calibrations]
        return np.array(seconds) / np.array(measured_seconds) - 1

    return fit_speed(residuals)


def step_seconds(rung: Rung, responses: Sequence[Response], parts: Parts) -> float:
    """Return the seconds of a step: from its first request to its last verdict."""
    ends = _response_ends(rung, responses, parts)
    if not rung.overlaps:
        return ends[-1][0] + parts.call * math.ceil(len(ends) / parts.scorers)
    return _last_verdict(ends, parts)


def _response_ends(
    rung: Rung, responses: Sequence[Response], parts: Parts
) -> list[tuple[float, int]]:
    """Return when each response ends, in order, and how many engines go on working then."""
    machines = Machines(
        speed=parts.speed, engines=NUM_ENGINES, max_running=parts.max_running, binds_late=False
    )
    cluster = Cluster(machines)
    open_responses = [
        simulation.Response(
            (1, response.prompt, response.sample),
            len(response.token_ids),
            response.length,
            expected_tokens(rung.order, response),
        )
        for response in responses
    ]
    ends: list[tuple[float, int]] = []

    def is_over() -> bool:
        nonlocal open_responses
        num_busy = sum(engine.is_busy for engine in cluster.engines)
        ends.extend((response.end, num_busy) for response in open_responses if response.is_complete)
        open_responses = [response for response in open_responses if not response.is_complete]
        return not open_responses

    cluster.request(Group([response]) for response in open_responses)
    cluster.wait(is_over)
    return ends


def _last_verdict(ends: Sequence[tuple[float, int]], parts: Parts) -> float:
    """Return when the last verdict comes if each response is scored as soon as it is there.

    While more engines and scorers work than there are cores, all of them are slower.
    """
    delay = 0.0  # of the engines
    free_times = [0.0] * parts.scorers  # a heap
    for end, num_busy in ends:
        slowdown = max(0.0, (num_busy + 1) / parts.cores - 1)
        begin = max(end + delay, heapq.heappop(free_times))
        heapq.heappush(free_times, begin + parts.call * (1 + slowdown))
        delay += parts.call * slowdown
    return max(free_times)
