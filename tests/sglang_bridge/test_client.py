"""The generation client against a small HTTP server that answers as scripted."""

import asyncio
import base64
import importlib.util
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from sglang_bridge.client import GenerateClient, RequestExpired, may_succeed_elsewhere
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import FinishReason, Generation, GenerationRejected
from sglang_bridge.settings import DEFAULT_KEEP_ALIVE_SECONDS
from tests.support.fake_engine import Reply, answer_each, http_server, short_name

SAMPLING = SimpleNamespace(max_new_tokens=4, temperature=0.7, top_p=0.9, stop_token_ids=(2,))


def good_answer() -> Reply:
    routes = base64.b64encode(np.zeros((3, 1, 1), "<i4").tobytes()).decode()
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "1",
        "output_token_logprobs": [[-1.0, 5, None]],
        "routed_experts": routes,
    }
    return {"output_ids": [5], "meta_info": meta}


def good_reply() -> web.Response:
    return web.json_response(good_answer())


def test_request_samples_the_untruncated_distribution() -> None:
    requests: list[tuple[dict, str]] = []

    async def generate(request: web.Request) -> web.Response:
        requests.append((await request.json(), request.headers["Authorization"]))
        assert request.headers.keys().isdisjoint({"Accept", "Accept-Encoding", "User-Agent"})
        return good_reply()

    async def scenario() -> None:
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, api_key="k", route_shape=(1, 1)) as client,
        ):
            generation = await client.generate([1, 2, 3], SAMPLING, rid="a")
            assert generation.output_ids.tolist() == [5]
            assert generation.routes is not None and generation.routes.shape == (3, 1, 1)

    asyncio.run(scenario())
    body, key = requests[0]
    assert key == "Bearer k"
    assert body["input_ids"] == [1, 2, 3]
    sampling = body["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["temperature"]) == (0.9, -1, 0.7)
    assert sampling["stop_token_ids"] == [2]
    assert "n" not in sampling  # one sample per request
    assert body["return_logprob"] and body["return_routed_experts"]


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    ("return_routes", "first_route_row", "max_mib"),
    [(False, 0, 2.0), (True, 0, 25.0), (True, 50_000, 2.0)],
)
def test_an_endless_reply_is_read_as_far_as_a_correct_one_could_go(
    status: int, return_routes: bool, first_route_row: int, max_mib: float
) -> None:
    """max_mib: what may be read, in MiB."""
    num_sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal num_sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while num_sent < 300 * 2**20:
            await response.write(b" " * 2**16)
            num_sent += 2**16
        return response

    async def scenario() -> None:
        async with (
            http_server({"/generate": flood}) as url,
            GenerateClient(url, route_shape=(24, 3)) as client,
        ):
            with pytest.raises(
                GenerationRejected, match=r"reply to a#[0-9a-f.]+; has more"
            ) as info:
                await client.generate(
                    [1] * 50_000,
                    SAMPLING,
                    rid="a",
                    return_routes=return_routes,
                    first_route_row=first_route_row,
                )
            assert info.value.reason == "malformed"

    asyncio.run(scenario())
    assert num_sent < (max_mib + 8) * 2**20  # the sockets' buffers hold some


@pytest.mark.slow
def test_a_reply_that_is_compressed_is_not_unpacked() -> None:
    async def bomb(request: web.Request) -> web.Response:
        body = zlib.compress(b" " * 2**26)
        return web.Response(body=body, headers={"Content-Encoding": "deflate"})

    async def scenario() -> None:
        async with http_server({"/generate": bomb}) as url, GenerateClient(url) as client:
            with pytest.raises(GenerationRejected, match="invalid start byte"):
                await client.generate([1], SAMPLING, rid="a", return_routes=False)

    asyncio.run(scenario())


def test_the_largest_correct_reply_passes() -> None:
    """Tokens of 128 spaces, each with its own weight version, and ids of seven digits."""
    num_tokens = 5000
    spans = [{"version": "123456789", "start": n, "end": n + 1} for n in range(num_tokens)]
    routes = base64.b64encode(np.zeros((num_tokens + 2, 8, 8), "<i4").tobytes()).decode()
    reply = {
        "text": "\t" * 128 * num_tokens,
        "output_ids": [1_234_567] * num_tokens,
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.2345678901234567e-05, 1_234_567, None]] * num_tokens,
            "weight_versions": spans,
            "routed_experts": routes,
        },
    }

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(reply)

    async def scenario() -> None:
        sampling = SimpleNamespace(**{**vars(SAMPLING), "max_new_tokens": num_tokens})
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, route_shape=(8, 8)) as client,
        ):
            generation = await client.generate([1, 2, 3], sampling, rid="a")
            assert len(generation.output_ids) == num_tokens

    asyncio.run(scenario())


def test_a_connection_that_was_idle_is_not_used_again() -> None:
    """After half of the server's limit at most: it may close it at the moment of a request."""
    last_uses: dict[asyncio.Transport, float] = {}

    async def generate(request: web.Request) -> web.Response:
        assert request.transport is not None
        now = asyncio.get_running_loop().time()
        if now - last_uses.get(request.transport, now) > 1.25:
            request.transport.close()
        last_uses[request.transport] = now
        return good_reply()

    async def scenario() -> None:
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, route_shape=(1, 1), server_keep_alive_seconds=2.5) as client,
        ):
            for _ in range(2):
                await client.generate([1, 2, 3], SAMPLING, rid="a")
            assert len(last_uses) == 1
            await asyncio.sleep(1.3)
            await client.generate([1, 2, 3], SAMPLING, rid="a")
            assert len(last_uses) == 2

    asyncio.run(scenario())


def test_the_server_closes_idle_connections_when_the_client_expects_it() -> None:
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.origin is not None
    source = (Path(sglang.origin).parent / "srt/environ.py").read_text()
    default = f"EnvInt({DEFAULT_KEEP_ALIVE_SECONDS})"
    assert f"SGLANG_TIMEOUT_KEEP_ALIVE = {default}" in source


def test_request_carries_its_seed() -> None:
    requests: list[dict] = []

    async def generate(request: web.Request) -> web.Response:
        requests.append((await request.json())["sampling_params"])
        return good_reply()

    async def scenario() -> None:
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, route_shape=(1, 1)) as client,
        ):
            for seed in (None, 2**63 - 1):
                await client.generate([1, 2, 3], SAMPLING, rid="a", seed=seed)

    asyncio.run(scenario())
    assert "sampling_seed" not in requests[0] and requests[1]["sampling_seed"] == 2**63 - 1


def test_no_request_name_is_a_prefix_of_another() -> None:
    """An abort ends every request whose name starts with the given one."""
    names: list[str] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        names.append((await request.json())["rid"])
        return good_reply()

    async def scenario() -> None:
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, route_shape=(1, 1)) as client,
        ):
            for _ in range(12):
                await client.generate([1, 2, 3], SAMPLING, rid="a")

    asyncio.run(scenario())
    assert not [
        (one, other)
        for one in names
        for other in names
        if one is not other and other.startswith(one)
    ]


def test_no_two_clients_give_requests_the_same_name() -> None:
    """SGLang refuses a name that it knows: it works on a lost client's requests for seconds."""
    names: list[str] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        names.append((await request.json())["rid"])
        return good_reply()

    async def scenario() -> None:
        async with http_server({"/generate": generate}) as url:
            for _ in range(2):
                async with GenerateClient(url, route_shape=(1, 1)) as client:
                    await client.generate([1, 2, 3], SAMPLING, rid="a")

    asyncio.run(scenario())
    assert len(set(names)) == 2 and all(name.startswith("a#") for name in names)


@pytest.mark.parametrize(
    ("status", "may_succeed"), [(500, True), (503, True), (401, True), (400, False), (413, False)]
)
def test_status_decides_if_another_engine_may_answer(status: int, may_succeed: bool) -> None:
    async def generate(request: web.Request) -> web.Response:
        return web.Response(status=status, text="no and no")

    async def scenario() -> None:
        async with http_server({"/generate": generate}) as url, GenerateClient(url) as client:
            with pytest.raises(RequestFailed, match=f"{status}: no and no") as error_info:
                await client.generate([1], SAMPLING, rid="a", return_routes=False)
            assert may_succeed_elsewhere(error_info.value) is may_succeed

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["deadline", "cancel", "close"])
def test_abandoned_request_closes_its_connection(how: str) -> None:
    request_started = asyncio.Event()
    connection_closed = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        request_started.set()
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        connection_closed.set()
        return response

    async def scenario() -> None:
        deadline = 1.0 if how == "deadline" else 60.0
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, deadline_seconds=deadline) as client,
        ):
            task = asyncio.create_task(client.generate([1], SAMPLING, rid="a", return_routes=False))
            if how == "deadline":
                with pytest.raises(
                    RequestExpired,
                    match=r"no request for 1 s .* engine\.request_timeout_s",
                ):
                    await task
            elif how == "cancel":
                await request_started.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await request_started.wait()
                await client.close()
                with pytest.raises(RequestFailed, match=r"was closed while a#[0-9a-f.]+; waited"):
                    await asyncio.wait_for(task, 5)
            await asyncio.wait_for(connection_closed.wait(), 5)

    asyncio.run(scenario())


def test_request_waits_while_its_engine_answers_others() -> None:
    """A deadline from the start of a request would drop the longest responses."""

    async def answer(body: Reply) -> Reply:
        await asyncio.sleep(2.25 if "long" in body["rid"] else 0.01)
        return good_answer()

    async def generate(request: web.Request) -> web.StreamResponse:
        return await answer_each(request, answer)

    async def scenario() -> None:
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, deadline_seconds=1.5, route_shape=(1, 1)) as client,
        ):
            long = asyncio.create_task(client.generate([1, 2, 3], SAMPLING, rid="long"))
            while not long.done():
                await client.generate([1, 2, 3], SAMPLING, rid="short")
                await asyncio.sleep(0.05)
            assert (await long).output_ids.tolist() == [5]
            with pytest.raises(RequestExpired):  # without other requests it expires
                await client.generate([1, 2, 3], SAMPLING, rid="long")

    asyncio.run(scenario())


def answer_abort_with(
    ids: list[int], *, routes: bool = True
) -> tuple[Generation | str, list[tuple[str, str]]]:
    """Abort a request at its deadline after the engine sampled `ids`.

    Returns the generation or the error's text, and the calls of `abort`.
    """
    abort_event = asyncio.Event()
    aborts = list[tuple[str, str]]()

    async def abort(url: str, names: Sequence[str]) -> None:
        aborts.extend((url, name) for name in names)
        abort_event.set()

    async def generate(request: web.Request) -> web.Response:
        await abort_event.wait()
        rows = base64.b64encode(np.zeros((2 + len(ids), 1, 1), "<i4").tobytes()).decode()
        meta = {
            "finish_reason": {"type": "abort", "message": "Aborted"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        return web.json_response(
            {"output_ids": ids, "meta_info": meta | ({"routed_experts": rows} if routes else {})}
        )

    async def scenario() -> Generation | str:
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, deadline_seconds=0.2, route_shape=(1, 1), abort=abort) as client,
        ):
            try:
                return await client.generate([1, 2, 3], SAMPLING, rid="a")
            except RequestExpired as error:
                return str(error)

    return asyncio.run(scenario()), aborts


@pytest.mark.parametrize("routes", [True, False])
def test_an_expired_request_is_an_aborted_response_with_its_tokens(routes: bool) -> None:
    """The response did not reach its token limit, so it is not a truncated one."""
    result, aborts = answer_abort_with([5, 6, 7], routes=routes)
    assert isinstance(result, Generation)
    assert (result.output_ids.tolist(), result.finish_reason) == ([5, 6, 7], FinishReason.ABORT)
    assert [short_name(rid) for _, rid in aborts] == ["a#0;"]


def test_response_that_ended_before_its_abort_is_complete() -> None:
    result, _ = answer_abort_with([5, *SAMPLING.stop_token_ids])
    assert isinstance(result, Generation) and result.finish_reason is FinishReason.STOP


def test_expired_request_without_tokens_fails() -> None:
    result, _ = answer_abort_with([])
    assert isinstance(result, str) and "answered no request" in result


def test_complete_response_without_its_routes_stays_aborted() -> None:
    result, _ = answer_abort_with([5, *SAMPLING.stop_token_ids], routes=False)
    assert isinstance(result, Generation) and result.finish_reason is FinishReason.ABORT


def test_unrequested_abort_is_an_aborted_response() -> None:
    async def generate(request: web.Request) -> web.Response:
        meta = {
            "finish_reason": {"type": "abort"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.0, 5, None]],
        }
        return web.json_response({"output_ids": [5], "meta_info": meta})

    async def scenario() -> None:
        async with (
            http_server({"/generate": generate}) as url,
            GenerateClient(url, route_shape=(1, 1)) as client,
        ):
            generation = await client.generate([1, 2, 3], SAMPLING, rid="a")
            assert generation.finish_reason is FinishReason.ABORT

    asyncio.run(scenario())


def test_engine_is_up_when_its_health_is() -> None:
    async def health(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async def scenario() -> bool:
        async with http_server({"/health": health}) as url, GenerateClient(url) as client:
            return await client.is_up()

    for status in (200, 503):
        assert asyncio.run(scenario()) is (status == 200)
    assert asyncio.run(GenerateClient("http://127.0.0.1:9").is_up()) is False


def test_refused_connection_may_succeed_elsewhere() -> None:
    async def scenario() -> None:
        async with GenerateClient("http://127.0.0.1:9") as client:
            with pytest.raises(RequestFailed, match="lost its connection") as error_info:
                await client.generate([1], SAMPLING, rid="a", return_routes=False)
            assert may_succeed_elsewhere(error_info.value)

    asyncio.run(scenario())


def test_malformed_reply_is_rejected_and_routes_need_a_shape() -> None:
    async def generate(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def scenario() -> None:
        async with http_server({"/generate": generate}) as url, GenerateClient(url) as client:
            with pytest.raises(GenerationRejected, match="malformed"):
                await client.generate([1], SAMPLING, rid="a", return_routes=False)
            with pytest.raises(ValueError, match="route_shape"):
                await client.generate([1], SAMPLING, rid="a")

    asyncio.run(scenario())
