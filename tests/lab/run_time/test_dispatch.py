"""The engine of each request, and the time at which it gets it: as in the collector."""

import pytest

from tests.lab.run_time.simulation.cluster import Cluster, Group, Machines
from tests.lab.run_time.simulation.engine import EngineSpeed, Response


def make_group(index: int, *lengths: int) -> Group:
    return Group([Response((1, index, i), 1, n) for i, n in enumerate(lengths)])


def sample(machines: Machines, *groups: Group) -> Cluster:
    """Sample groups to their end."""
    cluster = Cluster(machines)
    cluster.request(groups)
    cluster.wait(lambda: not any(group.num_open for group in groups))
    return cluster


def test_a_request_goes_to_the_engine_with_the_fewest_in_flight() -> None:
    machines = Machines(speed=EngineSpeed(step=1.0), engines=2, max_running=1)
    # Four slots: 10 and 2 at the first engine, 2 and 2 at the second one. It gets the others, too.
    cluster = sample(machines, make_group(0, 10, 2, 2, 2, 3, 3))
    assert cluster.now == pytest.approx(12)
    assert [engine.num_sampled for engine in cluster.engines] == [12, 10]


def test_a_group_goes_to_the_node_with_the_fewest_responses() -> None:
    machines = Machines(speed=EngineSpeed(step=1.0), engines=2, node_engines=1, max_running=9)
    groups = [make_group(0, 5, 5, 5), make_group(1, 4), make_group(2, 3), make_group(3, 2)]
    cluster = sample(machines, *groups)
    assert [engine.num_sampled for engine in cluster.engines] == [15, 9]


def test_a_group_that_is_complete_is_no_load() -> None:
    machines = Machines(speed=EngineSpeed(step=1.0), engines=2, node_engines=1, max_running=9)
    cluster = sample(machines, make_group(0, 5, 5, 5), make_group(1, 4))
    later_group = make_group(2, 3)
    cluster.request([later_group])
    cluster.wait(lambda: not later_group.num_open)
    assert [engine.num_sampled for engine in cluster.engines] == [15 + 3, 4]


def test_the_last_node_may_have_fewer_engines() -> None:
    machines = Machines(speed=EngineSpeed(), engines=5, node_engines=2)
    assert [len(node.engines) for node in machines.open_nodes()] == [2, 2, 1]


def test_engines_get_requests_after_the_dispatch() -> None:
    machines = Machines(speed=EngineSpeed(step=1.0, dispatch=0.25))
    assert sample(machines, make_group(0, 4)).now == pytest.approx(4.25)


def test_requests_reach_engines_one_after_the_other() -> None:
    cluster = Cluster(Machines(speed=EngineSpeed(step=1.0, dispatch=1.0, arrival=0.25)))
    groups = [make_group(index, 1) for index in range(4)]
    cluster.request(groups)
    cluster.wait(lambda: not any(group.num_open for group in groups))
    # The others arrive while the engine reads the first one
    assert [group.responses[0].end for group in groups] == [2.25, 3.25, 3.25, 3.25]


def test_a_free_engine_waits_for_a_request_on_its_way() -> None:
    cluster = Cluster(Machines(speed=EngineSpeed(step=1.0, dispatch=5.0)))
    first = make_group(0, 2)
    second = make_group(1, 1)
    cluster.request([first])
    cluster.train(3.0)
    cluster.request([second])
    cluster.wait(lambda: not second.num_open)
    assert [group.responses[0].end for group in (first, second)] == [5 + 2, 3 + 5 + 1]


def test_interrupted_requests_are_sent_again() -> None:
    cluster = Cluster(Machines(speed=EngineSpeed(step=1.0, dispatch=5.0)))
    first = make_group(0, 9)
    second = make_group(1, 1)
    cluster.request([first])
    cluster.train(8.0)
    cluster.request([second])
    cluster.train(4.0)
    cluster.interrupt()
    cluster.rest(0.5)
    cluster.proceed()
    cluster.wait(lambda: not first.num_open)
    # The first has seven tokens at 12 s. The second has not reached the engine by then.
    assert [group.responses[0].end for group in (first, second)] == [12.5 + 5 + 2, 12.5 + 5 + 1]


def test_requests_that_are_sent_again_do_not_queue_behind_those_that_were_interrupted() -> None:
    cluster = Cluster(Machines(speed=EngineSpeed(step=0.1, arrival=1.0)))
    groups = [make_group(index, 1) for index in range(4)]
    cluster.request(groups)
    cluster.train(0.5)
    cluster.interrupt()
    cluster.proceed()
    cluster.wait(lambda: not any(group.num_open for group in groups))
    assert [group.responses[0].end for group in groups] == pytest.approx([1.6, 2.6, 3.6, 4.6])


def test_a_wait_for_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing samples them"):
        Cluster(Machines(speed=EngineSpeed())).wait(lambda: False)


def with_expectation(index: int, *lengths: int, step: int = 1, expectation: int = 0) -> Group:
    responses = [Response((step, index, i), 1, n, expectation) for i, n in enumerate(lengths)]
    return Group(responses)


def test_the_longest_expected_response_of_the_earliest_step_gets_a_slot_first() -> None:
    machines = Machines(speed=EngineSpeed(step=1.0), max_running=1)
    groups = [
        with_expectation(0, 1, 1, expectation=1),
        with_expectation(1, 1, step=2, expectation=99),
        with_expectation(2, 1, expectation=9),
        with_expectation(3, 1),  # nothing is known of it
    ]
    sample(machines, *groups)
    ends = [group.responses[0].end for group in groups]
    # The first two were submitted while two slots were free
    assert sorted(ends[1:], key=float) == [ends[2], ends[3], ends[1]]


def test_a_group_waits_for_a_node_with_room() -> None:
    """Both nodes have two slots. The second is free long before the first."""
    lengths = [(9, 9), (1, 1), (5, 5)]
    ends = {}
    for binds_late in (True, False):
        machines = Machines(
            speed=EngineSpeed(step=1.0),
            engines=2,
            node_engines=1,
            max_running=1,
            binds_late=binds_late,
        )
        groups = [make_group(index, *group) for index, group in enumerate(lengths)]
        ends[binds_late] = sample(machines, *groups).now
    # Early binding gives the third group to the first node, because both have two responses
    assert ends == {True: 18, False: 28}


def test_groups_of_later_steps_take_no_room() -> None:
    """Both slots go to the later step. The other group has the next one all the same."""
    cluster = Cluster(Machines(speed=EngineSpeed(step=1.0), max_running=1))
    later_group = with_expectation(0, 9, 9, 9, 9, step=2)
    cluster.request([later_group])
    cluster.train(1.0)
    earlier_group = with_expectation(1, 1, step=1)
    cluster.request([earlier_group])
    cluster.wait(lambda: not earlier_group.num_open)
    assert earlier_group.responses[0].end == 9 + 9 + 1
