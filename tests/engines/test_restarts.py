"""Restarts are few in any hour, and wait longer each time until the process has been healthy."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.engines.node.restarts import RestartBudget
from tests.support.clocks import FakeClock


def test_the_delay_doubles_to_a_minute() -> None:
    clock = FakeClock()
    budget = RestartBudget(100, clock=clock)
    delays = []
    for _ in range(9):
        restart = budget.request("it ended")
        assert restart is not None
        delays.append(restart.delay_seconds)
        clock.now += 100
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_ten_healthy_minutes_reset_the_delay() -> None:
    clock = FakeClock()
    budget = RestartBudget(100, clock=clock)
    budget.request("one")
    for seconds, delay in ((599.0, 2), (600.0, 1), (599.0, 2), (300.0, 4)):
        clock.now += 1000  # it starts
        budget.note_healthy()
        clock.now += seconds / 2
        budget.note_healthy()  # noted repeatedly: the first time counts
        clock.now += seconds / 2
        restart = budget.request("next")
        assert restart is not None and restart.delay_seconds == delay


def test_restarts_of_the_last_hour_are_counted_with_their_reasons() -> None:
    clock = FakeClock()
    budget = RestartBudget(2, clock=clock)
    restarts = []
    for clock.now, reason in ((0.0, "a"), (1800.0, "b"), (3599.0, "c"), (3600.0, "d")):
        restarts.append(budget.request(reason))
    numbers = [None if restart is None else restart.number for restart in restarts]
    assert numbers == [1, 2, None, 2]
    assert budget.reasons == ["b", "d"]
    clock.now = 7200.0
    assert budget.reasons == [] and budget.limit == 2


def test_without_a_budget_nothing_is_started() -> None:
    assert RestartBudget(0, clock=FakeClock()).request("it ended") is None


@given(
    limit=st.integers(0, 6),
    history=st.lists(st.tuples(st.floats(0, 2000), st.booleans()), max_size=60),
)
def test_no_hour_has_more_restarts_than_its_limit(
    limit: int, history: list[tuple[float, bool]]
) -> None:
    clock = FakeClock()
    budget = RestartBudget(limit, clock=clock)
    times: list[float] = []
    for seconds, is_healthy in history:
        clock.now += seconds
        if is_healthy:
            budget.note_healthy()
            continue
        in_last_hour = [time for time in times if time > clock.now - 3600]
        restart = budget.request("it ended")
        assert (restart is None) == (len(in_last_hour) == limit)
        if restart is not None:
            times.append(clock.now)
            assert restart.number == len(in_last_hour) + 1
            assert 1 <= restart.delay_seconds <= 60
