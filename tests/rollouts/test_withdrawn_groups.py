"""A group that is withdrawn while a thread stores it, and is requested again."""

import asyncio
import threading
import time

import pytest

from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts import codec
from megatron_rl.rollouts.collector import Collector
from megatron_rl.rollouts.messages import FromCollector, GroupDone, SetVersion, Withdraw
from megatron_rl.rollouts.store import read_rollout
from tests.rollouts.test_abort_groups import request
from tests.support.fake_engine import configuration, fake_engine, reply
from tests.support.rollouts import assert_equal


def test_a_group_that_is_withdrawn_while_it_is_stored_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of the first request goes on while another group is stored."""
    is_storing = threading.Event()
    may_go_on = threading.Event()
    rollouts: dict[str, Rollout] = {}
    encode = codec.encode

    def encode_in_turn(rollout: Rollout) -> bytes:
        if not is_storing.is_set():
            is_storing.set()
            assert may_go_on.wait(10)
            return encode(rollout)
        rollouts[rollout.rollout_id] = rollout
        if rollout.rollout_id == "b/1":
            may_go_on.set()
            time.sleep(0.2)
        return encode(rollout)

    async def run() -> list[FromCollector]:
        outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
        async with fake_engine(lambda n, body: reply(body, "046")) as url:
            collector = Collector(0, configuration(url), outbox.put)
            await collector.handle(SetVersion(3))
            await collector.handle(request("a", 2))
            assert await asyncio.to_thread(is_storing.wait, 10)
            await collector.handle(Withdraw(("a",)))
            await collector.handle(request("b", 2))
            messages = [await asyncio.wait_for(outbox.get(), 10)]
            await collector.handle(request("a", 2, attempt=1))
            messages.append(await asyncio.wait_for(outbox.get(), 10))
            check(messages)
            await collector.close()
        return messages

    def check(messages: list[FromCollector]) -> None:
        for message in messages:
            assert isinstance(message, GroupDone), message
            for ref in message.group.rollouts:
                assert_equal(read_rollout(ref), rollouts[ref.rollout_id])

    monkeypatch.setattr("megatron_rl.rollouts.codec.encode", encode_in_turn)
    names = [m.group.group_id for m in asyncio.run(run()) if isinstance(m, GroupDone)]
    assert names == ["b", "a"]
