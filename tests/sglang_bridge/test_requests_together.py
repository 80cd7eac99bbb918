"""Requests that are made at the same moment: they share an HTTP request, and nothing else."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.client import GenerateClient, RequestExpired
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import FinishReason, Generation, GenerationRejected
from sglang_bridge.reply_stream import ReplyStream
from tests.support.fake_engine import Handler, Reply, answer_each, http_server, short_name

SAMPLING = SimpleNamespace(max_new_tokens=4, temperature=0.7, top_p=1.0, stop_token_ids=(2,))
AnswerOne = Callable[[Reply], Awaitable[Reply | bytes | int]]


def answer_with(token: int, reason: str = "length") -> Reply:
    meta = {
        "finish_reason": {"type": reason},
        "weight_version": "1",
        "output_token_logprobs": [[-1.0, token, None]],
    }
    return {"output_ids": [token], "meta_info": meta}


def handler_of(answer: AnswerOne, bodies: list[Any]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(body := await request.json())
        rid = body["rid"]
        body["rid"] = short_name(rid) if isinstance(rid, str) else [short_name(one) for one in rid]
        return await answer_each(request, answer)

    return handle


def sample(client: GenerateClient, index: int, **options: Any) -> Awaitable[Generation]:
    options = {"return_routes": False, **options}
    return client.generate([index], SAMPLING, rid=f"g/{index}", seed=index, **options)


def test_they_share_one_http_request_and_each_is_answered_when_it_ends() -> None:
    bodies: list[Any] = []
    ends = dict[int, float]()
    last = asyncio.Event()

    async def answer(body: Reply) -> Reply:
        index = body["input_ids"][0]
        if index == 0:
            await last.wait()
        return answer_with(10 + index)

    async def scenario() -> None:
        async with (
            http_server({"/generate": handler_of(answer, bodies)}) as url,
            GenerateClient(url) as client,
        ):

            async def wait(index: int) -> Generation:
                generation = await sample(client, index)
                ends[index] = asyncio.get_running_loop().time()
                return generation

            tasks = [asyncio.create_task(wait(index)) for index in range(5)]
            others = await asyncio.wait_for(asyncio.gather(*tasks[1:]), 5)
            assert not tasks[0].done()
            last.set()
            generations = [await tasks[0], *others]
            tokens = [generation.output_ids.tolist() for generation in generations]
            assert tokens == [[10], [11], [12], [13], [14]]

    asyncio.run(scenario())
    (body,) = bodies
    assert body["stream"] is True and body["return_routed_experts"] is False
    assert body["rid"] == [f"g/{index}#{index};" for index in range(5)]
    seeds = [parameters["sampling_seed"] for parameters in body["sampling_params"]]
    assert seeds == [0, 1, 2, 3, 4]
    intervals = {parameters["stream_interval"] for parameters in body["sampling_params"]}
    assert intervals == {4}, "nothing comes between the first token and the end"


def test_requests_for_other_routes_and_later_ones_have_their_own_http_request() -> None:
    bodies: list[Any] = []

    async def answer(body: Reply) -> Reply:
        return answer_with(5)

    async def scenario() -> None:
        async with (
            http_server({"/generate": handler_of(answer, bodies)}) as url,
            GenerateClient(url, route_shape=(1, 1)) as client,
        ):
            requests = [
                sample(client, 0),
                sample(client, 1),
                sample(client, 2, return_routes=True),
                sample(client, 3, return_routes=True, first_route_row=1),
            ]
            await asyncio.gather(*requests, return_exceptions=True)
            await sample(client, 4)

    asyncio.run(scenario())
    names = [body["rid"] for body in bodies]
    assert names == [["g/0#0;", "g/1#1;"], "g/2#2;", "g/3#3;", "g/4#4;"]
    assert (
        "routed_experts_start_len" not in bodies[1] and bodies[2]["routed_experts_start_len"] == 1
    )


def test_many_are_sent_in_several_http_requests() -> None:
    bodies: list[Any] = []

    async def answer(body: Reply) -> Reply:
        return answer_with(body["input_ids"][0])

    async def scenario() -> None:
        async with (
            http_server({"/generate": handler_of(answer, bodies)}) as url,
            GenerateClient(url) as client,
        ):
            generations = await asyncio.gather(*(sample(client, index) for index in range(100)))
            assert [int(one.output_ids[0]) for one in generations] == list(range(100))

    asyncio.run(scenario())
    assert sorted(len(body["rid"]) for body in bodies if isinstance(body["rid"], list)) == [
        4,
        32,
        32,
        32,
    ]


def test_one_that_is_cancelled_is_aborted_by_its_name_and_the_last_by_its_connection() -> None:
    aborts: list[tuple[str, ...]] = []
    http_requests: list[web.Request] = []
    has_begun = asyncio.Event()

    async def abort(url: str, names: Sequence[str]) -> None:
        aborts.append(tuple(map(short_name, names)))

    async def answer(body: Reply) -> Reply:
        has_begun.set()
        await asyncio.sleep(60)
        raise AssertionError("unreachable")

    async def handle(request: web.Request) -> web.StreamResponse:
        http_requests.append(request)
        return await answer_each(request, answer)

    def is_closed() -> bool:
        transport = http_requests[0].transport
        return transport is None or transport.is_closing()

    async def scenario() -> None:
        async with (
            http_server({"/generate": handle}) as url,
            GenerateClient(url, abort=abort) as client,
        ):
            tasks = [asyncio.ensure_future(sample(client, index)) for index in range(3)]
            await has_begun.wait()
            for index in (1, 0):
                tasks[index].cancel()
                await asyncio.sleep(0.05)
            assert aborts == [("g/1#1;",), ("g/0#0;",)]
            assert not is_closed()
            tasks[2].cancel()
            async with asyncio.timeout(5):
                while not is_closed():
                    await asyncio.sleep(0.01)
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)
            assert len(aborts) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_an_abort_that_comes_before_its_request_is_repeated(how: str) -> None:
    """SGLang ignores the abort of a name that it does not know."""
    aborts: list[str] = []
    answers = dict[str, asyncio.Future[Reply]]()

    async def abort(url: str, names: Sequence[str]) -> None:
        aborts.extend(map(short_name, names))
        for name in names:
            if name in answers and not answers[name].done():
                answers[name].set_result(answer_with(7, "abort"))

    async def answer(body: Reply) -> Reply:
        await asyncio.sleep(0.5 if how == "cancel" else 1.5)
        answers[body["rid"]] = asyncio.get_running_loop().create_future()
        return await answers[body["rid"]]

    async def scenario() -> None:
        deadline = 60.0 if how == "cancel" else 1.25
        async with (
            http_server({"/generate": handler_of(answer, [])}) as url,
            GenerateClient(url, abort=abort, deadline_seconds=deadline) as client,
        ):
            tasks = [asyncio.ensure_future(sample(client, index)) for index in range(2)]
            await asyncio.sleep(0.1)
            if how == "deadline":
                generations = await asyncio.gather(*tasks)
                assert all(one.finish_reason is FinishReason.ABORT for one in generations)
                assert sorted(aborts) == ["g/0#0;", "g/0#0;", "g/1#1;", "g/1#1;"]
                return
            tasks[0].cancel()
            await asyncio.sleep(2.5)
            assert aborts == ["g/0#0;", "g/0#0;"]
            assert not tasks[1].done() and sum(one.done() for one in answers.values()) == 1
            await client.abort("g/1#")
            await tasks[1]

    asyncio.run(scenario())


def test_requests_of_a_client_that_is_closed_at_once_are_not_sent() -> None:
    bodies: list[Any] = []

    async def answer(body: Reply) -> Reply:
        return answer_with(5)

    async def scenario() -> None:
        async with http_server({"/generate": handler_of(answer, bodies)}) as url:
            client = GenerateClient(url)
            tasks = [asyncio.ensure_future(sample(client, index)) for index in range(2)]
            await asyncio.sleep(0)
            await client.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, RequestFailed) for result in results)
            await asyncio.sleep(0.1)

    asyncio.run(scenario())
    assert not bodies


def test_abort_names_the_requests_that_run() -> None:
    aborts: list[tuple[str, ...]] = []
    answers = dict[str, asyncio.Future[Reply]]()

    async def abort(url: str, names: Sequence[str]) -> None:
        aborts.append(tuple(sorted(map(short_name, names))))
        for name in names:
            answers[name].set_result(answer_with(7, "abort"))

    async def answer(body: Reply) -> Reply:
        answers[body["rid"]] = asyncio.get_running_loop().create_future()
        return await answers[body["rid"]]

    async def scenario() -> None:
        async with (
            http_server({"/generate": handler_of(answer, [])}) as url,
            GenerateClient(url, abort=abort) as client,
        ):
            tasks = [asyncio.ensure_future(sample(client, index)) for index in (1, 2, 10)]
            while len(answers) < 3:
                await asyncio.sleep(0.01)
            await client.abort("h/")
            await client.abort("g/1#")
            assert (await tasks[0]).finish_reason is FinishReason.ABORT
            await client.abort("g/")
            await asyncio.gather(*tasks)

    asyncio.run(scenario())
    assert aborts == [("g/1#0;",), ("g/10#2;", "g/2#1;")]


def test_the_one_at_fault_fails_alone() -> None:
    """SGLang refuses the whole HTTP request for a prompt that is too long."""
    bodies: list[Any] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(body := await request.json())
        prompts = body["input_ids"] if isinstance(body["rid"], list) else [body["input_ids"]]
        if [1] not in prompts:
            return await answer_each(request, answer)
        error = {"error": {"message": "too long", "code": 400}}
        if isinstance(body["rid"], str):
            return web.json_response(error, status=400)
        text = f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def answer(body: Reply) -> Reply:
        return answer_with(body["input_ids"][0])

    async def scenario() -> None:
        async with http_server({"/generate": handle}) as url, GenerateClient(url) as client:
            requests = [sample(client, index) for index in range(3)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(results[1], RequestFailed) and results[1].status == 400
            assert short_name(str(results[1])).startswith(f"{url}: g/1#4; was answered 400: ")
            assert "too long" in str(results[1])
            others = [results[0], results[2]]
            assert [int(one.output_ids[0]) for one in others] == [0, 2]  # type: ignore[union-attr]

    asyncio.run(scenario())
    first, *others = [body["rid"] for body in bodies]
    assert len(others) == 3
    # Two seconds later, SGLang aborts what has a name of the HTTP request that it has refused
    assert not set(first) & set(others)


@pytest.mark.parametrize("status", [400, 503])
def test_the_scheduler_s_refusal_of_one_has_its_status(status: int) -> None:
    async def answer(body: Reply) -> Reply | int:
        index = body["input_ids"][0]
        return status if index == 1 else answer_with(index)

    async def scenario() -> None:
        async with (
            http_server({"/generate": handler_of(answer, [])}) as url,
            GenerateClient(url) as client,
        ):
            requests = [sample(client, index) for index in range(3)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(results[1], RequestFailed) and results[1].status == status
            words = f"{url}: g/1#1;: the engine has refused the request ({status}): refused"
            assert short_name(str(results[1])) == words
            assert isinstance(results[0], Generation) and isinstance(results[2], Generation)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        ("close", RequestFailed, "g/0#0; and 2 more lost its connection"),
        ("stop", RequestFailed, "ended without all replies"),
        ("garbage", GenerationRejected, "malformed"),
        ("index", GenerationRejected, "malformed"),
        ("endless", GenerationRejected, "more than"),
        ("silence", RequestExpired, "answered no request for"),
        ("500", RequestFailed, "answered 500: no"),
    ],
)
def test_the_end_of_a_stream_fails_those_that_wait(end: str, error: type, words: str) -> None:
    reply = answer_with(7) | {"index": 1}
    lines = {
        "garbage": [b"<html>\n\n"],
        "index": [b"data: " + json.dumps(reply | {"index": 3}).encode() + b"\n"],
        "endless": [b" " * 2**16] * 100,
    }

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        if end == "500":
            return web.Response(status=500, text="no")
        response = web.StreamResponse()
        response.force_close()
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(reply).encode() + b"\n\n")
        await asyncio.sleep(0.1)
        if end == "close":
            assert request.transport is not None
            request.transport.abort()
        for line in lines.get(end, []):
            await response.write(line)
        if end == "silence":
            await asyncio.sleep(30)
        return response

    async def scenario() -> None:
        async with (
            http_server({"/generate": handle}) as url,
            GenerateClient(url, deadline_seconds=0.5) as client,
        ):
            requests = [sample(client, index) for index in range(3)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            for result in results[::2] if end != "500" else results:
                assert isinstance(result, error) and words in short_name(str(result))
            if end != "500":
                assert isinstance(results[1], Generation)

    asyncio.run(scenario())


def test_a_refusal_of_the_whole_stream_names_the_engine_and_the_requests() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        error = {"error": {"message": "no memory", "code": 503}}
        text = f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def scenario() -> None:
        async with http_server({"/generate": handle}) as url, GenerateClient(url) as client:
            requests = [sample(client, index) for index in range(3)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            words = (
                f"{url}: g/0#0; and 2 more: the engine has refused the requests (503): no memory"
            )
            assert {short_name(str(result)) for result in results} == {words}
            assert {getattr(result, "status", None) for result in results} == {503}

    asyncio.run(scenario())


def test_closing_the_client_fails_those_that_wait() -> None:
    async def answer(body: Reply) -> Reply:
        await asyncio.sleep(60)
        return answer_with(5)

    async def scenario() -> None:
        async with (
            http_server({"/generate": handler_of(answer, [])}) as url,
            GenerateClient(url) as client,
        ):
            tasks = [asyncio.ensure_future(sample(client, index)) for index in range(2)]
            await asyncio.sleep(0.2)
            await client.close()
            for task in tasks:
                with pytest.raises(RequestFailed, match="was closed while g/"):
                    await task

    asyncio.run(scenario())


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_stream_has_the_same_replies_however_it_is_cut(data: st.DataObject) -> None:
    texts = data.draw(
        st.lists(st.text(max_size=200) | st.just("a" * 20_000), min_size=1, max_size=5)
    )
    replies = [
        {"output_ids": [1], "text": text, "index": index} for index, text in enumerate(texts)
    ]
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    events = [json.dumps(reply, separators=separators).encode() for reply in replies]
    first = b'{"output_ids":[1],"meta_info":{"finish_reason":null},"index":0}'
    body = b"".join(b"data: " + event + b"\n\n" for event in [first, *events, b"[DONE]"])
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12).map(sorted))
    stream = ReplyStream()
    results = [
        (index, b"".join(pieces))
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)
        for index, pieces in stream.feed(body[start:end])
    ]
    assert results == list(enumerate(events))
