"""The collector against a small HTTP server that answers as an engine does (its bytes, not its model)."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aiohttp import web

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.rollouts.collector import Collector
from megatron_rl.rollouts.engine_pool import EnginePool
from megatron_rl.rollouts.messages import (
    Configure,
    EngineEndpoint,
    Failed,
    FromCollector,
    GroupDone,
    GroupRequest,
    Pause,
    PausePolicy,
    Resume,
    RouteShape,
)
from megatron_rl.rollouts.store import read_rollout

CHECKPOINT = Path(__file__).parents[2] / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition"
TOKENIZER = Tokenizer.from_directory(CHECKPOINT)
PROMPT = Prompt(id="q", token_ids=TOKENIZER.encode("12+34="), answer="46", task="two_digit_addition")
Answer = Callable[[int], tuple[str, dict[str, object]]]


def reply(text: str, **changes: object) -> dict[str, object]:
    ids = [*TOKENIZER.encode(text), TOKENIZER.eos_ids[0]]
    rows = len(PROMPT.token_ids) + len(ids) - 1
    routes = np.tile(np.array([0, 1], np.int32), (rows, 4, 1))
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
        "output_token_logprobs": [(-0.5, token, None) for token in ids],
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    return {"output_ids": ids, "meta_info": meta | changes}


async def with_engine(answer: Callable[[int], dict[str, object] | int], body: Callable[[str], Awaitable[None]]) -> None:
    """Serve `/generate`: request number n gets `answer(n)`, a reply or a status."""
    count = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        result = answer(count - 1)
        await asyncio.sleep(0.01)
        return web.Response(status=result) if isinstance(result, int) else web.json_response(result)

    application = web.Application()
    application.router.add_post("/generate", generate)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        await body(f"http://127.0.0.1:{port}")
    finally:
        await runner.cleanup()


def configuration(url: str, **changes: object) -> Configure:
    base = Configure(
        engines=(EngineEndpoint(url=url),),
        tokenizer_path=str(CHECKPOINT),
        routes=RouteShape(moe_layers=(0, 1, 2, 3), num_hidden_layers=4, num_experts=8, topk=2),
        reward_name="exact_match",
        reward_answer="last_number",
        reward_timeout_s=5.0,
        request_timeout_s=5.0,
        retries=0,
        max_in_flight=4,
        train_truncated=True,
    )
    return msgspec.structs.replace(base, **changes)


def request(num_samples: int) -> GroupRequest:
    sampling = Sampling(max_new_tokens=6, temperature=1.0, stop_token_ids=TOKENIZER.eos_ids)
    return GroupRequest(group_id="g", prompt=PROMPT, num_samples=num_samples, sampling=sampling)


def collect(
    answer: Callable[[int], dict[str, object] | int], num_samples: int, check: Callable[[GroupDone], None]
) -> None:
    async def body(url: str) -> None:
        outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
        collector = Collector(0, configuration(url), outbox)
        assert await collector.handle(request(num_samples))
        message = await asyncio.wait_for(outbox.get(), 5)
        assert isinstance(message, GroupDone)
        check(message)  # while the payloads are there
        await collector.close()

    asyncio.run(with_engine(answer, body))


def test_samples_are_judged_and_their_payloads_kept() -> None:
    def check(done: GroupDone) -> None:
        group = done.group
        assert sorted(s.verdict.reward or 0.0 for s in group.samples) == [0.0, 1.0]
        assert all(s.versions == (3,) and s.finish_reason is FinishReason.STOP for s in group.samples)
        rollout = read_rollout(group.samples[0])
        assert rollout.routes is not None and rollout.routes.shape == (group.samples[0].num_inputs, 4, 2)
        assert rollout.routes.dtype == np.uint8

    collect(lambda n: reply("046" if n else "047"), 2, check)


def test_bad_samples_are_counted_and_the_others_live() -> None:
    broken = [
        reply("046"),
        reply("046", routed_experts="AAAA"),
        reply("046", weight_version="default"),
        reply("046", finish_reason={"type": "abort"}),
        503,
    ]

    def check(done: GroupDone) -> None:
        assert len(done.group.samples) == 1
        assert done.group.rejected == {"routes_length": 1, "version": 1, "aborted": 1, "engine": 1}
        assert done.generated_tokens >= 2 * 4  # what was generated and then rejected counts: 046 and its end

    collect(lambda n: broken[n], 5, check)


def test_duplicate_experts_are_rejected() -> None:
    rows = len(PROMPT.token_ids) + 3
    same = base64.b64encode(np.zeros((rows, 4, 2), np.int32).tobytes()).decode()
    collect(
        lambda n: reply("046", routed_experts=same), 1, lambda done: _assert_rejected(done.group, "routes_duplicate")
    )


def _assert_rejected(group: Group, reason: str) -> None:
    assert group.samples == () and group.rejected == {reason: 1}


def test_a_group_that_cannot_be_stored_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(url: str) -> None:
        outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
        collector = Collector(0, configuration(url), outbox)
        monkeypatch.setattr("os.memfd_create", _no_descriptors)
        await collector.handle(request(1))
        message = await asyncio.wait_for(outbox.get(), 5)
        assert isinstance(message, Failed) and "Too many open files" in message.reason
        await collector.close()

    asyncio.run(with_engine(lambda n: reply("046"), body))


def _no_descriptors(*_: object) -> int:
    raise OSError(24, "Too many open files")


def test_nothing_is_sent_while_paused_and_aborted_requests_are_sent_again() -> None:
    sent: list[int] = []

    def answer(n: int) -> dict[str, object]:
        sent.append(n)
        return reply("046")

    async def body(url: str) -> None:
        outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
        collector = Collector(0, configuration(url), outbox)
        await collector.handle(request(1))
        while not sent:
            await asyncio.sleep(0.001)
        await collector.handle(Pause(PausePolicy.ABORT))
        await asyncio.sleep(0.05)
        assert len(sent) == 1 and outbox.empty()
        await collector.handle(Resume())
        message = await asyncio.wait_for(outbox.get(), 5)
        assert isinstance(message, GroupDone) and len(message.group.samples) == 1
        assert len(sent) == 2
        await collector.close()

    asyncio.run(with_engine(answer, body))


def test_requests_in_flight_are_bounded() -> None:
    flying, most = 0, 0

    async def body(url: str) -> None:
        pool = EnginePool(
            [EngineEndpoint(url=url)], request_timeout_s=5, retries=0, max_in_flight=3, route_shape=(4, 2)
        )
        client = pool._clients[0]
        original = client.generate

        async def counted(*args: object, **kwargs: object) -> object:
            nonlocal flying, most
            flying += 1
            most = max(most, flying)
            try:
                return await original(*args, **kwargs)  # type: ignore[arg-type]
            finally:
                flying -= 1

        client.generate = counted  # type: ignore[method-assign, assignment]
        sampling = request(1).sampling
        await asyncio.gather(*(pool.generate(PROMPT.token_ids, sampling, f"r{i}") for i in range(10)))
        await pool.close()

    asyncio.run(with_engine(lambda n: reply("046"), body))
    assert most == 3
