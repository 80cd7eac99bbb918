"""A group that is withdrawn while a thread stores it, and is requested again."""

import asyncio
import threading
import time

import pytest

from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire import codec
from megatron_rl.rollouts.wire.messages import Drop, FromCollector, GroupDone
from megatron_rl.rollouts.wire.store import read_rollout
from tests.rollouts.test_abort_groups import request
from tests.support.collectors import Outbox
from tests.support.fake_engine import configuration, fake_engine, reply, serving
from tests.support.rollouts import assert_equal


class Encoder:
    """Encodes the first rollout only while another group is stored. rollouts: the others."""

    def __init__(self) -> None:
        self.is_storing = threading.Event()
        self.rollouts: dict[str, Rollout] = {}
        self._may_go_on = threading.Event()
        self._encode = codec.encode

    def __call__(self, rollout: Rollout) -> bytes:
        if not self.is_storing.is_set():
            self.is_storing.set()
            assert self._may_go_on.wait(10)
            return self._encode(rollout)
        self.rollouts[rollout.rollout_id] = rollout
        if rollout.rollout_id == "b/1":
            self._may_go_on.set()
            time.sleep(0.2)
        return self._encode(rollout)


async def collect(encoder: Encoder) -> list[FromCollector]:
    """Request groups a and b, and a again. Compare their rollouts with those that were encoded."""
    outbox = Outbox()
    async with fake_engine(lambda n, body: reply(body, "046")) as url:
        collector = Collector(0, configuration(), outbox.put)
        await collector.handle(serving(url, version=3))
        await collector.handle(request("a", 2))
        assert await asyncio.to_thread(encoder.is_storing.wait, 10)
        await collector.handle(Drop(("a",)))
        await collector.handle(request("b", 2))
        messages = [await asyncio.wait_for(outbox.get(), 10)]
        await collector.handle(request("a", 2, attempt=1))
        messages.append(await asyncio.wait_for(outbox.get(), 10))
        for message in messages:
            assert isinstance(message, GroupDone), message
            for ref in message.group.rollouts:
                assert_equal(read_rollout(ref), encoder.rollouts[ref.rollout_id])
        await collector.close()
    return messages


def test_a_group_that_is_withdrawn_while_it_is_stored_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = Encoder()
    monkeypatch.setattr("megatron_rl.rollouts.wire.codec.encode", encoder)
    messages = asyncio.run(collect(encoder))
    names = [m.group.group_id for m in messages if isinstance(m, GroupDone)]
    assert names == ["b", "a"]
