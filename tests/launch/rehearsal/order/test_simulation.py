"""Progress of all ranks together, with sequences written by hand."""

from collections.abc import Sequence

import msgspec
import pytest

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.order.check import check_order
from launch.rehearsal.order.grid import Grid, Program, require_equal_groups
from launch.rehearsal.order.simulation import OrderFault, Simulation
from launch.rehearsal.order.trace import (
    ANNOUNCED,
    PIPELINE_GROUP,
    RECEIVE,
    SEND,
    WORLD,
    Group,
    Operation,
    Phase,
    Trace,
)

# Four ranks: pipelines (0, 2) and (1, 3), replicas (0, 1) and (2, 3)
PIPELINE = 1
REPLICAS = 3
GROUPS = [
    Group("WORLD", (0, 1, 2, 3)),
    Group(PIPELINE_GROUP, (0, 2)),
    Group(PIPELINE_GROUP, (1, 3)),
    Group("DATA_PARALLEL_GROUP", (0, 1)),
    Group("DATA_PARALLEL_GROUP", (2, 3)),
]
REDUCE = Operation("allreduce_", REPLICAS, "float32", 8)
GATHER = Operation("allgather_", WORLD, "int64", 8)
BROADCAST = Operation("broadcast_", WORLD, "bfloat16", 16, root=0)
FORWARD = Operation(SEND, PIPELINE, "bfloat16", 4, peer=1)
FROM_FIRST = Operation(RECEIVE, PIPELINE, "bfloat16", 4, peer=0)
BACKWARD = Operation(SEND, PIPELINE, "bfloat16", 4, peer=0)
FROM_LAST = Operation(RECEIVE, PIPELINE, "bfloat16", 4, peer=1)


def program(*events: Operation | int) -> Program:
    """Operations that the rank waits for at once. Numbers are events: see `Phase`."""
    operations = [event for event in events if isinstance(event, Operation)]
    codes: list[int] = []
    count = 0
    for event in events:
        if isinstance(event, int):
            codes.append(event)
            continue
        codes.append(count)
        count += 1
        codes.append(-count)
    return Program(operations, codes, {0: "update"}, 0)


def starts(*operations: Operation, waits: Sequence[int]) -> Program:
    """Operations that are all started before the rank waits for some of them."""
    return Program(operations, [*range(len(operations)), *waits], {0: "update"}, 0)


def run(first: Program, last: Program, **others: Program) -> int:
    """Run stages of two ranks each; `others` replace the programs of single ranks."""
    programs = [first, first, last, last]
    for name, other in others.items():
        programs[int(name.removeprefix("rank"))] = other
    simulation = Simulation(Grid(GROUPS, 4), programs)
    simulation.run()
    return simulation.operations


FIRST = program(BROADCAST, FORWARD, FROM_LAST, REDUCE, GATHER)
LAST = program(BROADCAST, FROM_FIRST, BACKWARD, REDUCE, GATHER)


def test_equal_orders_reach_the_end() -> None:
    assert run(FIRST, LAST) == 20


def test_two_swapped_collectives_of_one_rank_are_named() -> None:
    other_order = program(BROADCAST, FROM_FIRST, BACKWARD, GATHER, REDUCE)
    words = r"ranks wait without end.*rank 2.*allreduce.*waits for; rank 3.*allgather of int64"
    with pytest.raises(OrderFault, match=words):
        run(FIRST, LAST, rank3=other_order)


def test_swapped_collectives_in_one_group_differ() -> None:
    other = replace_operation(REDUCE, name="_reduce_scatter_base_")
    one = program(REDUCE, other)
    words = r"operations differ. rank 1, phase 'update', operation 1: reduce_scatter_base"
    with pytest.raises(OrderFault, match=words):
        run(one, program(), rank1=program(other, REDUCE))


def test_a_collective_that_one_stage_leaves_out_is_named() -> None:
    short = program(BROADCAST, FROM_FIRST, BACKWARD, REDUCE)
    with pytest.raises(OrderFault, match=r"allgather.*waits for; rank 2 has ended"):
        run(FIRST, short)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "broadcast of float16, 16 bytes"),
        ({"num_bytes": 32}, "broadcast of bfloat16, 32 bytes"),
        ({"root": 2}, "with root or group 2"),
    ],
)
def test_another_dtype_size_or_root_is_named(change: dict[str, int | str], words: str) -> None:
    other = program(replace_operation(BROADCAST, **change))
    with pytest.raises(OrderFault, match=f"rank 3, phase 'update', operation 1: .*{words}"):
        run(program(BROADCAST), program(BROADCAST), rank3=other)


def test_bytes_that_a_collective_announces_are_not_compared() -> None:
    free_size = replace_operation(BROADCAST, num_bytes=ANNOUNCED)
    assert run(program(BROADCAST), program(free_size)) == 4


def test_a_message_of_another_size_is_named() -> None:
    longer = replace_operation(FROM_FIRST, num_bytes=8)
    with pytest.raises(OrderFault, match=r"operations differ.*recv of bfloat16, 8 bytes from rank"):
        run(program(FORWARD), program(longer))


def test_stages_that_both_send_first_wait_for_each_other() -> None:
    first = program(FORWARD, FROM_LAST)
    last = program(BACKWARD, FROM_FIRST)
    words = "send of bfloat16.*to rank 2.*waits for; rank 2.*to rank 0.*rank 0, which waits"
    with pytest.raises(OrderFault, match=words):
        run(first, last)


def test_batched_messages_in_both_directions_progress() -> None:
    first = starts(*in_batch(FORWARD, FROM_LAST), waits=(-1, -2))
    last = starts(*in_batch(BACKWARD, FROM_FIRST), waits=(-1, -2))
    assert run(first, last) == 8


def test_single_messages_between_two_ranks_run_one_after_another() -> None:
    """Two ranks share a communicator. Without a batch their sends block each other."""
    first = starts(FORWARD, FROM_LAST, waits=(-1, -2))
    last = starts(BACKWARD, FROM_FIRST, waits=(-1, -2))
    with pytest.raises(OrderFault, match="4 ranks wait without end"):
        run(first, last)


def test_a_collective_overlaps_with_one_of_another_group() -> None:
    one = starts(REDUCE, GATHER, waits=(-1, -2))
    other = starts(GATHER, REDUCE, waits=(-2, -1))
    assert run(one, other) == 8


def test_a_message_that_nobody_receives_is_named_though_nobody_waits() -> None:
    with pytest.raises(OrderFault, match=r"send.*never ends: rank\(s\) 2 of 1 never begin it"):
        run(starts(FORWARD, waits=()), program())


def test_ranks_of_one_class_use_their_own_groups() -> None:
    """Rank 3 is the representative of rank 2, whose replicas are (2, 3) too."""
    traces = [trace(0, FORWARD), trace(1, FORWARD), trace(2, FROM_FIRST), trace(3, FROM_FIRST)]
    assert check_order(traces).operations == 4
    with pytest.raises(RehearsalUnavailable, match="no rank like rank 1 was rehearsed: stage 0"):
        check_order([traces[0], traces[2], traces[3]])


def test_ranks_that_create_other_groups_are_refused() -> None:
    other = trace(1)
    other.groups[3] = Group("DATA_PARALLEL_GROUP", (0, 3))
    with pytest.raises(RehearsalUnavailable, match="ranks 0 and 1 create different groups"):
        require_equal_groups([trace(0), other])


def trace(rank: int, *operations: Operation) -> Trace:
    events = [event for index in range(len(operations)) for event in (index, -index - 1)]
    return Trace(rank, 4, list(GROUPS), list(operations), [Phase("update", events)])


def replace_operation(operation: Operation, **change: int | str) -> Operation:
    return msgspec.structs.replace(operation, **change)


def in_batch(*operations: Operation) -> list[Operation]:
    return [replace_operation(operation, batch=1) for operation in operations]


def test_the_map_of_groups_follows_families() -> None:
    grid = Grid(GROUPS, 4)
    assert [grid.group_of(rank, PIPELINE) for rank in range(4)] == [1, 2, 1, 2]
    assert grid.representatives() == {(0, True): 0, (0, False): 1, (1, True): 2, (1, False): 3}
    with pytest.raises(RehearsalUnavailable, match="rank 2 has no group like unnamed group 5"):
        Grid([*GROUPS, Group("", (0, 1))], 4).group_of(2, 5)
