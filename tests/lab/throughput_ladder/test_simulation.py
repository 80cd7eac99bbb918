"""Simulated rungs against times worked out by hand."""

from dataclasses import replace

import pytest

from tests.lab.run_time.simulation.engine import EngineSpeed
from tests.lab.throughput_ladder.rungs import BASELINE, RUNGS, Order
from tests.lab.throughput_ladder.simulation import (
    Calibration,
    Parts,
    calibration_responses,
    fit_engines,
    step_seconds,
)
from tests.lab.throughput_ladder.workload import Response

# A pass takes a second: n tokens take n seconds, because reading gives the first one
PARTS = Parts(speed=EngineSpeed(step=1.0), max_running=1, call=0.5, scorers=1, cores=4)
OVERLAPPED = replace(BASELINE, overlaps=True)


def responses(*lengths: int) -> list[Response]:
    return [
        Response(prompt=index, sample=0, token_ids=[3], length=length, history=10 * length)
        for index, length in enumerate(lengths)
    ]


def test_rewards_after_the_last_response_take_their_time() -> None:
    # One engine samples 4 and 3, the other one 2 and 2
    assert step_seconds(BASELINE, responses(4, 2, 3, 2), PARTS) == pytest.approx(7 + 4 * 0.5)
    two_scorers = replace(PARTS, scorers=2)
    assert step_seconds(BASELINE, responses(4, 2, 3), two_scorers) == pytest.approx(7 + 2 * 0.5)


def test_overlapped_rewards_expose_the_last_call() -> None:
    assert step_seconds(OVERLAPPED, responses(4, 2, 3, 2), PARTS) == pytest.approx(7 + 0.5)


def test_a_scorer_that_is_slower_than_engines_decides() -> None:
    slow_scorer = replace(PARTS, call=10.0)
    # The first response ends at 2 s
    assert step_seconds(OVERLAPPED, responses(4, 2, 3, 2), slow_scorer) == pytest.approx(2 + 40)


def test_a_scorer_without_a_core_of_its_own_slows_engines_down() -> None:
    """While both engines work, three processes share two cores: a call delays them by 0.25 s."""
    two_cores = replace(PARTS, cores=2)
    # At 2 s both go on. At 4 s both have ended a response, and one engine works on. At 7 s none.
    seconds = step_seconds(OVERLAPPED, responses(4, 2, 3, 2), two_cores)
    assert seconds == pytest.approx(7 + 0.25 * 1 + 0.5)


def test_the_longest_goes_first() -> None:
    """The longest begins at once, not at 2 s. A request waits behind it at its engine."""
    lengths = (1, 1, 1, 1, 1, 9)
    longest = replace(OVERLAPPED, order=Order.HISTORY)
    before, after = (step_seconds(r, responses(*lengths), PARTS) for r in (OVERLAPPED, longest))
    assert (before, after) == pytest.approx((2 + 9 + 0.5, 9 + 1 + 0.5))


def test_constants_are_those_of_the_steps_of_calibration() -> None:
    """Constants predict all rungs of other lengths, though one may stand for another."""
    speed = EngineSpeed(step=4e-3, request=2e-4, prompt_token=2e-5, dispatch=0.01, arrival=4e-4)
    planted_parts = Parts(speed=speed, max_running=8, call=6e-3, scorers=1, cores=2)
    steps = [
        Calibration(step, step_seconds(BASELINE, step, replace(planted_parts, call=0.0)))
        for step in calibration_responses(8)
    ]
    parts = replace(planted_parts, speed=fit_engines(steps, 8))
    lengths = [5 + 97 * index % 211 for index in range(64)]
    for rung in RUNGS:
        seconds = step_seconds(rung, responses(*lengths), planted_parts)
        assert step_seconds(rung, responses(*lengths), parts) == pytest.approx(seconds, rel=0.03)
