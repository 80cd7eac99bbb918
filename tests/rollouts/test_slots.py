"""The bound of requests in flight, which follows the number of engines, and their order."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollouts.collector.engines.slots import Slots
from megatron_rl.rollouts.wire.messages import Priority


class Holders:
    """Tasks that hold slots, or wait for one."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.num_holders = 0
        self.first_numbers: list[int] = []  # the numbers of those that got a slot, in this order

    def start(self, count: int, priority: Priority = (0, 0)) -> None:
        for _ in range(count):
            self._ends.append(asyncio.Event())
            hold = self._hold(len(self.tasks), self._ends[-1], priority)
            self.tasks.append(asyncio.create_task(hold))

    async def end(self, count: int) -> None:
        """Let the first holders give their slots back."""
        for end in self._ends[:count]:
            end.set()
        del self._ends[:count]
        await settle()

    async def _hold(self, number: int, end: asyncio.Event, priority: Priority) -> None:
        async with self._slots.hold(priority):
            self.first_numbers.append(number)
            self.num_holders += 1
            try:
                await end.wait()
            finally:
                self.num_holders -= 1


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 5))


async def cancel(holders: Holders) -> None:
    for task in holders.tasks:
        task.cancel()
    await asyncio.gather(*holders.tasks, return_exceptions=True)


def test_there_is_no_slot_at_first_and_as_many_as_the_capacity() -> None:
    async def work() -> None:
        slots = Slots()
        holders = Holders(slots)
        holders.start(5)
        await settle()
        assert holders.num_holders == 0
        slots.resize(2)
        await settle()
        assert holders.num_holders == 2
        slots.resize(4)
        await settle()
        assert holders.num_holders == 4
        await holders.end(4)
        assert holders.num_holders == 1
        await cancel(holders)

    run(work())


def test_holders_keep_their_slots_when_the_capacity_shrinks() -> None:
    async def work() -> None:
        slots = Slots()
        slots.resize(4)
        holders = Holders(slots)
        holders.start(6)
        await settle()
        slots.resize(2)
        await settle()
        assert holders.num_holders == 4
        await holders.end(2)
        assert holders.num_holders == 2  # both slots are gone
        await holders.end(1)
        assert holders.num_holders == 2
        await cancel(holders)

    run(work())


def test_free_slots_go_at_once() -> None:
    async def work() -> None:
        slots = Slots()
        slots.resize(5)
        slots.resize(2)
        holders = Holders(slots)
        holders.start(5)
        await settle()
        assert holders.num_holders == 2
        slots.resize(0)
        await holders.end(2)
        assert holders.num_holders == 0
        slots.resize(1)
        await settle()
        assert holders.num_holders == 1
        await cancel(holders)

    run(work())


def test_a_waiting_task_that_is_cancelled_takes_no_slot() -> None:
    async def work() -> None:
        slots = Slots()
        slots.resize(3)
        slots.resize(1)
        holders = Holders(slots)
        holders.start(3)
        await settle()
        assert holders.num_holders == 1
        await cancel(holders)
        others = Holders(slots)
        others.start(3)
        await settle()
        assert others.num_holders == 1
        await cancel(others)

    run(work())


_CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "start", "end"]), st.integers(1, 4)), max_size=25
)


@given(changes=_CHANGES)
def test_there_are_as_many_holders_as_slots_after_any_changes(
    changes: list[tuple[str, int]],
) -> None:
    async def work() -> None:
        slots = Slots()
        holders = Holders(slots)
        capacity = num_started = num_holders = 0
        for change, count in changes:
            if change == "add":
                capacity += count
                slots.resize(capacity)
            elif change == "remove":
                capacity -= min(count, capacity)
                slots.resize(capacity)
            elif change == "start":
                holders.start(count)
                num_started += count
            else:
                num_ended = min(count, holders.num_holders)
                await holders.end(num_ended)
                num_started -= num_ended
                num_holders -= num_ended
            await settle()
            # Holders of slots that are gone keep them
            num_holders = max(num_holders, min(num_started, capacity))
            assert holders.num_holders == num_holders
        await cancel(holders)

    run(work())


def test_a_task_that_is_cancelled_as_it_gets_a_slot_gives_it_on() -> None:
    async def work() -> None:
        slots = Slots()
        holders = Holders(slots)
        holders.start(2)
        await settle()
        slots.resize(1)
        holders.tasks[0].cancel()  # it has the slot, and has not run since
        await settle()
        assert (holders.first_numbers, holders.num_holders) == ([1], 1)
        await cancel(holders)

    run(work())


_PRIORITIES = st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 0)), min_size=1, max_size=12)


@given(priorities=_PRIORITIES, capacity=st.integers(1, 4), data=st.data())
def test_slots_go_by_step_then_length_then_order_of_coming(
    priorities: list[Priority], capacity: int, data: st.DataObject
) -> None:
    """Also when some of those that wait are cancelled, and the capacity changes meanwhile."""

    async def work() -> None:
        slots = Slots()
        holders = Holders(slots)
        for priority in priorities:
            holders.start(1, priority)
        await settle()
        numbers = range(len(priorities))
        cancelled_numbers = data.draw(st.sets(st.sampled_from(numbers)))
        for number in cancelled_numbers:
            holders.tasks[number].cancel()
        await settle()
        order = sorted(
            set(numbers) - cancelled_numbers, key=lambda number: (priorities[number], number)
        )
        for size in range(1, len(order) + 1):
            slots.resize(min(size, capacity))
            await settle()
            assert holders.first_numbers == order[: len(holders.first_numbers)]
            assert holders.num_holders <= capacity
            holders.tasks[holders.first_numbers[-1]].cancel()
            await settle()
        assert holders.first_numbers == order
        await cancel(holders)

    run(work())
