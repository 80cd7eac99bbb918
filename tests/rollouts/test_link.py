"""A collector's connection to rank 0 while the network comes and goes."""

import asyncio
import socket

import msgspec
import pytest
import zmq

from megatron_rl.rollouts.collector.link import CollectorLink, LinkLost
from megatron_rl.rollouts.wire.messages import Alive, Stop

PUBLIC_KEY, SECRET_KEY = zmq.curve_keypair()
RUN_KEY = (PUBLIC_KEY + zmq.curve_keypair()[1]).decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listen(context: "zmq.Context[zmq.Socket[bytes]]", port: int) -> "zmq.Socket[bytes]":
    """Open what rank 0 has."""
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = SECRET_KEY
    router.linger = 0
    router.bind(f"tcp://127.0.0.1:{port}")
    return router


async def wait_for_message(router: "zmq.Socket[bytes]", seconds: float) -> list[bytes]:
    assert await asyncio.to_thread(router.poll, int(seconds * 1000)), "nothing arrived"
    return router.recv_multipart()


async def connect_before_rank_0_listens() -> None:
    port = free_port()
    context = zmq.Context()
    link = CollectorLink("127.0.0.1", port, node=3, epoch=1, run_key=RUN_KEY)
    end = asyncio.create_task(link.wait_until_lost())
    await link.send(Alive())
    await asyncio.sleep(1.5)
    router = listen(context, port)
    # What was sent before the connection may be gone
    sender = asyncio.create_task(send_often(link))
    name, body = await wait_for_message(router, 10)
    assert (name, body) == (b"3.1", msgspec.msgpack.encode(Alive()))
    router.send_multipart([name, msgspec.msgpack.encode(Stop())])
    assert await asyncio.wait_for(link.receive(), 5) == Stop()
    router.close()
    with pytest.raises(LinkLost, match="the connection to rank 0 ended"):
        await asyncio.wait_for(end, 5)
    sender.cancel()
    link.close()
    context.term()


async def send_often(link: CollectorLink) -> None:
    while True:
        await link.send(Alive())
        await asyncio.sleep(0.1)


def test_a_collector_connects_once_rank_0_can_be_reached() -> None:
    asyncio.run(connect_before_rank_0_listens())
