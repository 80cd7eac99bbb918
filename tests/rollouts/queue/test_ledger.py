"""The table of groups: legal moves, loads, and the order of arrivals."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollouts.queue.ledger import (
    LEGAL_MOVES,
    OPEN_STATES,
    GroupEntry,
    GroupLedger,
    GroupState,
)
from tests.support.collectors import request

START_STATES = (GroupState.WAITING, GroupState.RUNNING, GroupState.SAVED)
MOVES = [(state, target) for state, targets in LEGAL_MOVES.items() for target in targets]


def add(ledger: GroupLedger, name: str, state: GroupState) -> GroupEntry:
    """Add a group, and move it to a state in legal moves."""
    entry = GroupEntry(request(name))
    if state is GroupState.SAVED:
        ledger.add(entry, state)
        return entry
    ledger.add(entry, GroupState.WAITING)
    if state is not GroupState.WAITING:
        ledger.assign(entry, 0)
    if state in (GroupState.ABORTING, GroupState.ARRIVED):
        ledger.move(entry, state)
    if state is GroupState.DELIVERED:
        ledger.move(entry, GroupState.ARRIVED)
        ledger.move(entry, state)
    return entry


@pytest.mark.parametrize("target", list(GroupState))
@pytest.mark.parametrize("state", [state for state in GroupState if state is not GroupState.GONE])
def test_a_move_is_made_if_the_table_has_it(state: GroupState, target: GroupState) -> None:
    ledger = GroupLedger()
    entry = add(ledger, "a", state)
    if target not in LEGAL_MOVES[state]:
        with pytest.raises(RuntimeError, match=f"from {state.name} to {target.name}"):
            ledger.move(entry, target)
        assert entry.state is state
        return
    entry.node = 0
    ledger.move(entry, target)
    assert entry.state is target
    assert ("a" in ledger) == (target is not GroupState.GONE)


def test_every_state_can_be_reached_and_left() -> None:
    assert {state for state, _ in MOVES} == set(GroupState)
    assert {target for _, target in MOVES} == set(GroupState)


def test_every_move_says_why() -> None:
    assert all(reason for targets in LEGAL_MOVES.values() for reason in targets.values())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 1)), max_size=60))
def test_loads_and_states_follow_the_moves(steps: list[tuple[int, int, int]]) -> None:
    ledger = GroupLedger()
    entries: dict[str, GroupEntry] = {}
    for index, choice, node in steps:
        name = f"g{index}"
        entry = entries.get(name)
        if entry is None:
            entries[name] = GroupEntry(request(name, index + 1))
            state = START_STATES[choice % len(START_STATES)]
            ledger.add(entries[name], state, node if state is GroupState.RUNNING else None)
            continue
        targets = list(LEGAL_MOVES[entry.state])
        target = targets[choice % len(targets)]
        if target is GroupState.RUNNING:
            ledger.assign(entry, node)
        else:
            ledger.move(entry, target)
        if target is GroupState.GONE:
            del entries[name]
    expected = Counter[int]()
    for entry in entries.values():
        if entry.state in (GroupState.RUNNING, GroupState.ABORTING):
            assert entry.node is not None
            expected[entry.node] += entry.request.num_samples
    assert +ledger.loads == expected
    for state in GroupState:
        ids = {entry.id for entry in entries.values() if entry.state is state}
        assert {entry.id for entry in ledger.in_states(state)} == ids
    assert {entry.id for entry in ledger.find(["g0", "g1", "g2", "g3"])} == set(entries)


def test_a_repeated_request_and_a_new_one_differ_from_those_whose_answer_may_come_late() -> None:
    ledger = GroupLedger()
    entry = add(ledger, "a", GroupState.RUNNING)
    assert entry.is_with(0, 0)
    ledger.move(entry, GroupState.WAITING)
    assert (entry.node, entry.attempt, ledger.next_attempt) == (None, 1, 1)
    ledger.assign(entry, 1)
    assert not entry.is_with(0, 0) and not entry.is_with(1, 0) and entry.is_with(1, 1)
    ledger.move(entry, GroupState.GONE)
    assert ledger.next_attempt == 2
    delivered = add(ledger, "b", GroupState.DELIVERED)
    ledger.move(delivered, GroupState.GONE)  # its answer has come
    assert ledger.next_attempt == 2


def test_arrivals_keep_their_order_and_can_be_offered_again() -> None:
    ledger = GroupLedger()
    first, second, third = (add(ledger, name, GroupState.ARRIVED) for name in "abc")
    assert [ledger.arrival(n) for n in range(3)] == [first, second, third]
    ledger.offer_again(first)
    ledger.move(second, GroupState.DELIVERED)
    assert (ledger.first_arrival, ledger.num_arrived) == (2, 4)
    assert [ledger.arrival(n) for n in range(4)] == [None, None, third, first]
    assert [entry.id for entry in ledger.in_states(*OPEN_STATES)] == []


def test_a_group_is_added_once() -> None:
    ledger = GroupLedger()
    add(ledger, "a", GroupState.RUNNING)
    with pytest.raises(RuntimeError, match="group a is there already"):
        add(ledger, "a", GroupState.RUNNING)
    assert ledger.loads[0] == request("a").num_samples


def test_the_load_of_a_step_counts_with_those_of_later_ones() -> None:
    ledger = GroupLedger()
    entries = [GroupEntry(msgspec.structs.replace(request(f"g{s}", s), step=s)) for s in (1, 2, 3)]
    for entry in entries:
        ledger.add(entry, GroupState.WAITING)
        ledger.assign(entry, 0)
    assert [ledger.load_up_to(0, step) for step in range(5)] == [0, 1, 3, 6, 6]
    ledger.set_demand(entries[1], 1)
    assert [ledger.load_up_to(0, step) for step in range(4)] == [0, 1, 2, 5]
    assert (ledger.loads[0], ledger.load_up_to(1, 9)) == (5, 0)
    for entry in entries:
        ledger.move(entry, GroupState.GONE)
    assert (ledger.loads[0], ledger.load_up_to(0, 9)) == (0, 0)
