"""A collector that stops sampling a group: its running requests are aborted and counted."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.collector.engines.gate import ABORT_SECONDS
from megatron_rl.rollouts.wire.messages import (
    AbortRequests,
    Drop,
    Dropped,
    FromCollector,
    GroupDone,
    GroupRequest,
)
from tests.support.collectors import Outbox
from tests.support.fake_engine import (
    Reply,
    answer_each,
    configuration,
    http_server,
    reply,
    serving,
    short_name,
)
from tests.support.scripted_model import EOS, PROMPT

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
IDS = [5, 6, 7]


@dataclass
class AbortableEngine:
    """Answers a request once it is aborted, with three tokens, or once `finish` is called."""

    waiting: dict[str, tuple[Reply, "asyncio.Future[Reply]"]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)

    def abort(self, names: Sequence[str]) -> None:
        self.aborts.extend(names)
        for name, (request, answer) in self.waiting.items():
            if name in names and not answer.done():
                ids = [(-0.5, token, None) for token in IDS]
                changes = {"finish_reason": {"type": "abort"}, "output_token_logprobs": ids}
                answer.set_result(reply(request, "046", **changes) | {"output_ids": IDS})

    def finish(self, beginning: str, text: str = "046") -> None:
        for name, (request, answer) in self.waiting.items():
            if name.startswith(beginning) and not answer.done():
                answer.set_result(reply(request, text))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        async def answer_one(body: Reply) -> Reply:
            self.names.append(body["rid"])
            answer = asyncio.get_running_loop().create_future()
            self.waiting[body["rid"]] = body, answer
            return await answer

        return await answer_each(request, answer_one)


def request(group_id: str, num_samples: int = 2, attempt: int = 0) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        prompt=PROMPT,
        num_samples=num_samples,
        sampling=SAMPLING,
        attempt=attempt,
    )


Check = Callable[[Collector, AbortableEngine, "asyncio.Queue[FromCollector]"], Awaitable[None]]


def run(check: Check, environment: EnvironmentSettings | None = None) -> None:
    """Run a check with a collector that sends its engine up to four requests at a time."""

    async def open_and_check() -> None:
        engine = AbortableEngine()
        async with http_server({"/generate": engine.generate}) as url:
            outbox = Outbox()

            async def send(message: FromCollector) -> None:
                if isinstance(message, AbortRequests):
                    engine.abort(message.names)  # rank 0 does it
                else:
                    await outbox.put(message)

            collector = Collector(0, configuration(environment), send)
            await collector.handle(serving(url))
            await check(collector, engine, outbox)
            await collector.close()

    asyncio.run(open_and_check())


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def finish_second_attempt(
    engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
) -> GroupDone:
    """Let the engine answer both requests of the second attempt, and return the group."""
    await wait_for(lambda: len(engine.names) == 4)
    engine.finish("g/")
    message = await asyncio.wait_for(outbox.get(), 5)
    assert isinstance(message, GroupDone) and message.attempt == 1
    return message


def test_the_running_requests_of_a_group_are_aborted_and_counted() -> None:
    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        await collector.handle(request("g-1"))
        await collector.handle(request("g-10"))
        await wait_for(lambda: len(engine.names) == 4)
        await collector.handle(Drop(("g-1", "unknown"), is_reported=True))
        message = await asyncio.wait_for(outbox.get(), 5)
        assert message == Dropped(group_id="g-1", generated_tokens=6)
        assert set(map(short_name, engine.aborts)) == {"g-1/0#0;", "g-1/1#1;"}
        engine.finish("g-10/")
        message = await asyncio.wait_for(outbox.get(), 5)
        assert isinstance(message, GroupDone) and message.group.group_id == "g-10"
        assert outbox.empty() and len(engine.names) == 4

    run(check)


def test_requests_that_wait_for_a_slot_are_not_sent() -> None:
    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        await collector.handle(request("g", 7))
        await wait_for(lambda: len(engine.names) == 4)
        await collector.handle(Drop(("g",), is_reported=True))
        message = await asyncio.wait_for(outbox.get(), 5)
        assert message == Dropped(group_id="g", generated_tokens=12)
        await asyncio.sleep(0.1)
        assert len(engine.names) == 4

    run(check)


def test_responses_that_are_complete_count_too() -> None:
    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        await collector.handle(request("g"))
        await wait_for(lambda: len(engine.names) == 2)
        engine.finish("g/0")  # four tokens
        await asyncio.sleep(0.2)
        await collector.handle(Drop(("g",), is_reported=True))
        message = await asyncio.wait_for(outbox.get(), 5)
        assert message == Dropped(group_id="g", generated_tokens=7)

    run(check)


def test_a_group_that_was_aborted_can_be_requested_again() -> None:
    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        await collector.handle(request("g"))
        await wait_for(lambda: len(engine.names) == 2)
        await collector.handle(Drop(("g",), is_reported=True))
        await asyncio.wait_for(outbox.get(), 5)
        await collector.handle(request("g", attempt=1))
        message = await finish_second_attempt(engine, outbox)
        assert message.generated_tokens == 8

    run(check)


def test_the_next_request_for_a_group_that_was_withdrawn_is_not_aborted() -> None:
    """The engine had not aborted the first one in time."""

    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        abort = engine.abort
        engine.abort = engine.aborts.append  # type: ignore[method-assign, assignment]
        await collector.handle(request("g"))
        await wait_for(lambda: len(engine.names) == 2)
        await collector.handle(Drop(("g",), is_reported=True))
        await wait_for(lambda: len(engine.aborts) > 0)
        await collector.handle(Drop(("g",)))
        await collector.handle(request("g", attempt=1))
        engine.abort = abort  # type: ignore[method-assign]
        await wait_for(lambda: len(engine.names) == 4)
        num_aborts = len(engine.aborts)
        await asyncio.sleep(3 * ABORT_SECONDS)
        assert len(engine.aborts) == num_aborts
        await finish_second_attempt(engine, outbox)

    run(check)


def test_a_group_that_is_withdrawn_before_its_abort_begins_can_be_requested_again() -> None:
    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        await collector.handle(request("g"))
        await wait_for(lambda: len(engine.names) == 2)
        await collector.handle(Drop(("g",), is_reported=True))
        await collector.handle(Drop(("g",)))
        await asyncio.sleep(0.05)
        await collector.handle(request("g", attempt=1))
        await finish_second_attempt(engine, outbox)

    run(check)


TWO_TURNS = """
class TwoTurns:
    async def play(self, episode):
        await episode.respond()
        episode.observe("no,")
        await episode.respond()
"""


@pytest.mark.slow
def test_an_environment_gets_no_further_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first turn ends by itself while the group is aborted."""
    (tmp_path / "two_turns.py").write_text(TWO_TURNS)
    monkeypatch.syspath_prepend(tmp_path)

    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        await collector.handle(request("g", 1))
        await wait_for(lambda: len(engine.names) == 1)
        engine.abort = engine.finish  # type: ignore[method-assign, assignment]
        await collector.handle(Drop(("g",), is_reported=True))
        message = await asyncio.wait_for(outbox.get(), 5)
        assert message == Dropped(group_id="g", generated_tokens=4)
        await asyncio.sleep(0.2)
        assert len(engine.names) == 1

    run(check, EnvironmentSettings(name="two_turns:TwoTurns"))


STUBBORN = """
import asyncio
from pathlib import Path

class Stubborn:
    async def play(self, episode):
        await episode.respond()
        Path({marker!r}).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
        episode.observe("no,")
        await episode.respond()
"""


@pytest.mark.slow
def test_an_environment_that_ignores_its_cancellation_gets_no_further_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "first_turn_has_ended"
    (tmp_path / "stubborn.py").write_text(STUBBORN.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)

    async def check(
        collector: Collector, engine: AbortableEngine, outbox: "asyncio.Queue[FromCollector]"
    ) -> None:
        await collector.handle(request("g", 1))
        await wait_for(lambda: len(engine.names) == 1)
        engine.finish("g/")
        await wait_for(marker.exists)
        await collector.handle(Drop(("g",), is_reported=True))
        message = await asyncio.wait_for(outbox.get(), 5)
        assert message == Dropped(group_id="g", generated_tokens=4)
        await asyncio.sleep(0.5)
        assert len(engine.names) == 1

    run(check, EnvironmentSettings(name="stubborn:Stubborn"))
