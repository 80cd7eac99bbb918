"""The time in which engines have nothing to do."""

import asyncio
import threading
from collections import Counter

from megatron_rl.config.schema import EngineSettings, RolloutSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.collector.engines.members import IdleTime
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import FromCollector, Served
from sglang_bridge.engine import Engine
from tests.support.clocks import FakeClock
from tests.support.collectors import Peer, group_done, request
from tests.support.fake_engine import LAYERS, TOPK, Reply, fake_engine, reply
from tests.support.scripted_model import EOS, PROMPT

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
FORM = RequestForm(api_key=None, longest_response=10, route_shape=(LAYERS, TOPK), vocab_size=48)


def test_idle_seconds_are_a_mean_over_the_engines() -> None:
    clock = FakeClock()
    idle = IdleTime(clock)
    clock.now += 5  # without an engine
    idle.note(2, 2)
    clock.now += 3
    idle.note(1, 2)
    clock.now += 4
    idle.note(0, 2)
    clock.now += 7
    assert idle.seconds == 3 + 4 / 2
    idle.note(0, 0)
    clock.now += 9
    assert idle.seconds == 5


def test_a_pool_is_idle_except_while_an_engine_works() -> None:
    async def ignore(message: FromCollector) -> None: ...

    def answer(n: int, body: Reply) -> Reply:
        return reply(body, "046")

    async def run() -> tuple[float, float, float]:
        async with fake_engine(answer, seconds=0.5) as url:
            pool = EnginePool(EngineSettings(), FORM, ignore)
            await pool.set_engines([Engine(url=url)])
            await asyncio.sleep(0.2)
            before = pool.idle_seconds
            start = asyncio.get_running_loop().time()
            await pool.generate(
                PROMPT.token_ids, SAMPLING, rid="r", return_routes=True, rejected_tokens=Counter()
            )
            seconds = asyncio.get_running_loop().time() - start
            after = pool.idle_seconds
            await pool.close()
        return before, after - before, seconds

    before, during, seconds = asyncio.run(run())
    assert before >= 0.2
    assert during < seconds - 0.4


def test_the_queue_reports_idle_engines_since_the_last_call(hub: CollectorHub, peer: Peer) -> None:
    """Each collector counts from its start. Its answers tell."""
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4))
    queue.submit([request("a"), request("b", 3), request("c", evaluation=True)])
    assert (queue.count_in_flight(), queue.engines_idle_seconds()) == (5, 0.0)
    answer = group_done("a")
    peer.send(type(answer)(group=answer.group, generated_tokens=5, engines_idle=2.0))
    next(queue.as_completed(lambda: None))
    assert queue.count_in_flight() == 3
    assert queue.engines_idle_seconds() == 2.0
    assert queue.engines_idle_seconds() == 0.0
    threading.Timer(0.2, lambda: peer.send(Served(0, 1, engines_idle=2.5))).start()
    queue.hold(abort=lambda: None, timeout_seconds=10)
    assert queue.engines_idle_seconds() == 0.5
