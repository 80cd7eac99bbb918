"""The simulated engine against times worked out by hand."""

from typing import Any

import pytest

from tests.lab.run_time.simulation.engine import EngineSpeed, Piece, Response, SimulatedEngine

SPEED = EngineSpeed(step=1.0, request=0.1, kv_token=0.01, prompt_token=0.5)


def make_piece(length: int, prompt_tokens: int = 3) -> Piece:
    return Piece(Response((1, 0, 0), prompt_tokens, length), length)


def run_engine(engine: SimulatedEngine, start: float = 0.0) -> list[tuple[Any, list[int]]]:
    """The times at which pieces ended, with their tokens."""
    ends = []
    engine.start(start)
    while engine.is_busy:
        now = engine.end
        pieces = engine.finish()
        if pieces:
            ends.append((pytest.approx(now), [piece.tokens for piece in pieces]))
        engine.start(now)
    return ends


def test_decode_seconds_are_the_sum_over_passes() -> None:
    contexts = [20 + 4 * i for i in range(7)]
    by_pass = [1.0 + 0.1 * 4 + 0.01 * context for context in contexts]
    assert SPEED.decode_seconds(7, 4, 20) == pytest.approx(sum(by_pass))


def test_a_response_alone() -> None:
    engine = SimulatedEngine(SPEED, 8)
    engine.add(make_piece(3))
    # Reads 3 tokens, which gives the first token; then contexts of 4 and 5
    assert run_engine(engine) == [(1 + 1.5 + 1.1 + 0.04 + 1.1 + 0.05, [3])]
    assert (engine.num_sampled, engine.num_read, engine.in_flight) == (3, 3, 0)


def test_responses_share_passes() -> None:
    engine = SimulatedEngine(SPEED, 8)
    for length in (1, 2, 3):
        engine.add(make_piece(length))
    reading = 1 + 4.5
    both = 1 + 0.2 + 0.08
    last = 1 + 0.1 + 0.05
    assert run_engine(engine) == [
        (reading, [1]),
        (reading + both, [2]),
        (reading + both + last, [3]),
    ]


def test_requests_wait_for_room_in_their_order() -> None:
    engine = SimulatedEngine(EngineSpeed(step=1.0), 2)
    for length in (5, 2, 4, 1):
        engine.add(make_piece(length))
    # 5 and 2 run; at 2 s a pass reads the third; at 6 s the first, which has waited for that pass
    assert run_engine(engine) == [(2, [2]), (6, [5, 4]), (7, [1])]


def test_a_request_joins_after_the_present_pass() -> None:
    engine = SimulatedEngine(EngineSpeed(step=1.0), 2)
    engine.add(make_piece(9))
    engine.start(0.0)
    engine.finish()
    engine.start(1.0)
    assert engine.end == pytest.approx(9)
    engine.add(make_piece(2))
    engine.start(3.5)
    assert engine.end == pytest.approx(4)
    # A pass reads the request, which ends with the next one. The first needs four more.
    engine.finish()
    assert run_engine(engine) == [(2, [2]), (6, [9])]


def test_an_engine_stops_after_the_present_pass_and_gives_back_what_it_has() -> None:
    engine = SimulatedEngine(EngineSpeed(step=1.0), 2)
    for length in (9, 6, 4):
        engine.add(make_piece(length))
    engine.start(0.0)
    engine.finish()
    engine.start(1.0)
    engine.stop(3.5)
    assert engine.end == pytest.approx(4)
    with pytest.raises(RuntimeError, match="in the middle"):
        engine.withdraw()
    assert engine.finish() == []
    engine.start(4.0)
    assert not engine.is_busy
    pieces = engine.withdraw()
    assert [(piece.tokens, piece.num_sampled) for piece in pieces] == [(9, 4), (6, 4), (4, 0)]
    assert engine.in_flight == 0
    assert engine.busy_seconds == pytest.approx(4.0)


@pytest.mark.parametrize("kv_token", [0.0, 0.01])
@pytest.mark.parametrize(("seconds", "passes"), [(0.0, 1), (0.9, 1), (1.0, 1), (2.5, 3), (99.0, 7)])
def test_passes_that_have_begun(kv_token: float, seconds: float, passes: int) -> None:
    speed = EngineSpeed(step=1.0 - 4 * kv_token, kv_token=kv_token)
    engine = SimulatedEngine(speed, 1)
    engine.add(make_piece(8))
    engine.start(0.0)
    begin = engine.end
    engine.finish()
    engine.start(begin)
    engine.stop(min(begin + seconds, engine.end))
    engine.finish()
    assert engine.passes == passes
    assert engine.busy_seconds == pytest.approx(
        speed.read_seconds(3) + speed.decode_seconds(passes, 1, 4)
    )


def test_a_pass_that_reads_takes_a_time_for_each_token() -> None:
    assert EngineSpeed(step=1.0, prompt_token=0.5).read_seconds(6) == 1.0 + 3.0


def cached_engine(kv_tokens: float) -> SimulatedEngine:
    return SimulatedEngine(EngineSpeed(step=1.0), 8, kv_tokens)


@pytest.mark.parametrize(("kv_tokens", "ends"), [(16, [4, 8]), (17, [4])])
def test_a_request_joins_if_the_cache_holds_all_of_it(kv_tokens: int, ends: list[int]) -> None:
    """Each needs 3 + 4 tokens, and one more. Less has to be used and reserved than there are."""
    engine = cached_engine(kv_tokens)
    engine.add(make_piece(4))
    engine.add(make_piece(4))
    assert [time for time, _ in run_engine(engine)] == ends
    assert engine.num_retractions == 0


def piece_with_limit(length: int, limit: int, prompt_tokens: int) -> Piece:
    return Piece(Response((1, 0, 0), prompt_tokens, length, limit=limit), length)


@pytest.mark.parametrize(
    ("kv_tokens", "ends"), [(38.6, [(4, [2]), (10, [9])]), (38.5, [(9, [9]), (11, [2])])]
)
def test_a_share_of_what_running_responses_may_get_is_reserved(
    kv_tokens: float, ends: list[tuple[int, list[int]]]
) -> None:
    """At 2 s, the first has 3 tokens in the cache, and reserves 0.699 x 18 of the others.

    The second one needs 2 + 20 + 1 tokens, fewer than what is left. If it cannot join, it waits
    until the first one ends.
    """
    engine = cached_engine(kv_tokens)
    engine.add(piece_with_limit(9, 20, 2))
    engine.start(0.0)
    engine.finish()
    engine.start(1.0)
    engine.add(piece_with_limit(2, 20, 2))
    engine.start(1.5)
    assert engine.end == pytest.approx(2.0)
    engine.finish()
    assert run_engine(engine, 2.0) == ends


def test_a_full_cache_retracts_the_response_with_the_fewest_tokens() -> None:
    """Before the pass at 20 s, 2 + 19 and 2 + 18 tokens are more than the cache holds."""
    engine = cached_engine(40)
    engine.add(piece_with_limit(20, 20, 2))
    engine.start(0.0)
    engine.finish()
    engine.start(1.0)
    second = piece_with_limit(20, 20, 2)
    engine.add(second)
    engine.start(1.5)
    engine.finish()
    # A pass reads the second, and 17 fit. The first ends with the next one. Then the second is read
    # again, which gives its 19th token.
    assert run_engine(engine, 2.0) == [(21, [20]), (23, [20])]
    assert second.num_sampled == 20
    assert engine.num_retractions == 1
    assert engine.num_read == 2 + 2 + 20
    assert engine.num_sampled == 20 + 20


def test_a_response_that_the_cache_never_holds_is_refused() -> None:
    engine = cached_engine(24)
    engine.add(piece_with_limit(1, 20, 2))
    with pytest.raises(ValueError, match=r"kv_tokens=23: .* up to 22 tokens, and need at least 24"):
        cached_engine(23).add(piece_with_limit(1, 20, 2))
