"""The tokens that engines count, compared with those that the run counts."""

from typing import Any

from megatron_rl.engines.token_counter import TokenCounter
from sglang_bridge.errors import RequestFailed

Reading = int | None | Exception


class CountingEngine:
    """An engine whose counter has this value."""

    def __init__(self, url: str, reading: Reading = 0) -> None:
        self.url = url
        self.reading = reading

    def generated_tokens(self) -> int | None:
        if isinstance(self.reading, Exception):
            raise self.reading
        return self.reading


def counter_of(*engines: Any) -> tuple[TokenCounter, list[str]]:
    lines: list[str] = []
    return TokenCounter(engines, lines.append), lines


def test_tokens_since_the_last_comparison_are_counted() -> None:
    """Tokens before the first one, such as a warm-up's, belong to no step."""
    first = CountingEngine("http://a", 7)
    second = CountingEngine("http://b", 100)
    counter, lines = counter_of(first, second)
    first.reading = 17
    second.reading = 130
    comparison = counter.compare(40)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (40, 0)
    first.reading = 27
    comparison = counter.compare(4)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (10, 6)
    assert lines == []


def test_an_engine_without_a_counter_is_named_once() -> None:
    with_counter = CountingEngine("http://a", 1)
    without_counter = CountingEngine("http://b", None)
    counter, lines = counter_of(with_counter, without_counter)
    assert [counter.compare(5) for _ in range(3)] == [None, None, None]
    (line,) = lines
    assert "http://b" in line and "--enable-metrics" in line and "http://a" not in line


def test_a_counter_that_does_not_answer_for_a_while_loses_nothing() -> None:
    engine = CountingEngine("http://a", 10)
    counter, lines = counter_of(engine)
    for _ in range(2):
        engine.reading = RequestFailed("http://a/metrics: no answer")
        assert counter.compare(20) is None
    engine.reading = 75
    comparison = counter.compare(20)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (65, 5)
    assert len(lines) == 1 and "engine http://a: " in lines[0] and "no answer" in lines[0]


def test_a_server_that_starts_again_is_left_out_until_it_joins() -> None:
    """Its warm-up samples tokens that belong to no step."""
    steady = CountingEngine("http://a", 10)
    restarted_engine = CountingEngine("http://b", 1000)
    counter, lines = counter_of(steady, restarted_engine)
    steady.reading = 60
    restarted_engine.reading = 0  # its server starts
    assert counter.compare(50) is None
    steady.reading = 100
    restarted_engine.reading = 1  # it warms up
    comparison = counter.compare(40)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (40, 0)
    counter.set_engines([steady, restarted_engine])
    assert counter.compare(5) is None
    steady.reading = 110
    restarted_engine.reading = 31
    comparison = counter.compare(40)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (40, 0)
    assert len(lines) == 1 and "http://b was started again" in lines[0]


def test_the_only_server_starts_again() -> None:
    engine = CountingEngine("http://a", 1000)
    counter, _ = counter_of(engine)
    engine.reading = 1
    assert [counter.compare(50), counter.compare(0)] == [None, None]
    counter.set_engines([engine], have_sampled=False)
    engine.reading = 41
    comparison = counter.compare(40)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (40, 0)


def test_comparisons_begin_with_the_first_reading_of_all_engines() -> None:
    engine = CountingEngine("http://a", RequestFailed("busy"))
    counter, lines = counter_of(engine)
    engine.reading = 1000
    assert counter.compare(5) is None
    engine.reading = 1010
    comparison = counter.compare(10)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (10, 0)
    assert len(lines) == 1


def test_engines_that_join_are_counted_from_then_on() -> None:
    """Tokens from before it joined belong to no step, and neither do tokens of one that left."""
    first = CountingEngine("http://a", 10)
    counter, lines = counter_of(first)
    second = CountingEngine("http://b", 500)
    counter.set_engines([first, second])
    first.reading = 20
    assert counter.compare(10) is None
    first.reading = 25
    second.reading = 507
    comparison = counter.compare(10)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (12, 2)
    counter.set_engines([second])
    first.reading = RequestFailed("gone")
    assert counter.compare(1) is None
    second.reading = 510
    comparison = counter.compare(3)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (3, 0)
    assert lines == []


def test_the_first_step_is_compared_too() -> None:
    """Engines serve from a moment on at which nothing of the run has been sampled."""
    engine = CountingEngine("http://a", 10)
    counter, _ = counter_of(engine)
    engine.reading = 12
    counter.set_engines([engine], have_sampled=False)
    engine.reading = 20
    comparison = counter.compare(7)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (8, 1)


def test_comparisons_begin_anew_after_tokens_that_nobody_counted() -> None:
    """A collector that ended has counted tokens, and told nobody."""
    engine = CountingEngine("http://a", 0)
    counter, _ = counter_of(engine)
    engine.reading = 1000
    counter.restart()
    assert counter.compare(5) is None  # its last request is still running
    engine.reading = 1000 + 3 + 10
    assert counter.compare(10) is None
    engine.reading += 4
    comparison = counter.compare(4)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (4, 0)


def test_the_requests_of_a_collector_that_ended_run_on_while_an_engine_joins() -> None:
    engine = CountingEngine("http://a", 0)
    joining_engine = CountingEngine("http://b", 8)
    counter, _ = counter_of(engine)
    engine.reading = 20
    counter.restart()
    counter.set_engines([engine, joining_engine])
    assert counter.compare(5) is None
    engine.reading = 23  # the last request of the collector has ended
    joining_engine.reading = 18
    assert counter.compare(10) is None
    joining_engine.reading = 28
    comparison = counter.compare(10)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (10, 0)


def test_a_run_may_begin_without_an_engine() -> None:
    """The list of engines may be empty until people add one."""
    counter, lines = counter_of()
    assert counter.compare(0) is None
    engine = CountingEngine("http://a", 7)
    counter.set_engines([engine])
    assert counter.compare(0) is None
    engine.reading = 9
    comparison = counter.compare(2)
    assert comparison is not None
    assert (comparison.engine_tokens, comparison.uncounted_tokens) == (2, 0)
    assert lines == []
