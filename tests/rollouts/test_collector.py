"""The collector with a small HTTP server in place of an engine."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import CreditSettings, EngineSettings, EnvironmentSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import FinishReason, Role
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire.messages import (
    AbortRequests,
    Alive,
    Configure,
    Drop,
    EngineLeftOut,
    FromCollector,
    GroupDone,
    GroupRequest,
    Problem,
    Served,
)
from megatron_rl.rollouts.wire.store import RolloutGone, read_rollout
from tests.support.collectors import Outbox
from tests.support.fake_engine import (
    Answer,
    Reply,
    configuration,
    fake_engine,
    reply,
    routes,
    serving,
    short_name,
)
from tests.support.scripted_model import EOS, PROMPT

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))


def request(num_samples: int, *, evaluation: bool = False) -> GroupRequest:
    return GroupRequest(
        group_id="g",
        prompt=PROMPT,
        num_samples=num_samples,
        sampling=SAMPLING,
        evaluation=evaluation,
    )


def collect(
    answer: Answer,
    group_request: GroupRequest,
    check: Callable[[FromCollector, Collector], Awaitable[None] | None],
    environment: EnvironmentSettings | None = None,
    seconds: float = 0.01,
    **changes: object,
) -> None:
    """Request one group from a collector, and check its message while the rollouts are stored.

    Reports about the engine are dropped.
    """

    async def run() -> None:
        async with fake_engine(answer, seconds=seconds) as url:
            outbox = Outbox()
            settings: Configure = msgspec.structs.replace(configuration(environment), **changes)
            collector = Collector(0, settings, outbox.put)
            await collector.handle(serving(url))
            assert await collector.handle(group_request)
            message = await asyncio.wait_for(outbox.get(), 30)
            while isinstance(message, EngineLeftOut):
                message = await asyncio.wait_for(outbox.get(), 30)
            pending = check(message, collector)
            if pending is not None:
                await pending
            await collector.close()

    asyncio.run(run())


def test_rollouts_are_scored_and_kept_until_they_are_released() -> None:
    async def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.generated_tokens == 8
        assert 0.01 <= message.seconds < 30, "each response takes 0.01 s"
        samples = message.group.rollouts
        assert sorted(s.verdict.reward or 0.0 for s in samples) == [0.0, 1.0]
        assert all(s.versions == (3,) and s.finish_reason is FinishReason.STOP for s in samples)
        rollout = read_rollout(samples[0])
        assert rollout.routes is not None and rollout.routes.shape == (samples[0].num_inputs, 4, 2)
        assert rollout.routes.dtype == np.uint8
        await collector.handle(Drop(("g",)))
        with pytest.raises(RolloutGone):
            read_rollout(samples[0])

    collect(lambda n, body: reply(body, "046" if n else "047"), request(2), check)


@pytest.mark.parametrize(("ngram", "share"), [(2, 7 / 9 - 0.02), (9, 0.0), (None, 0.0)])
def test_repetition_is_measured_if_configured(ngram: int | None, share: float) -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone)
        assert [sample.repetition for sample in message.group.rollouts] == [pytest.approx(share)]

    settings = CreditSettings(repetition_ngram=ngram)
    collect(
        lambda n, body: reply(body, "44444444"), request(1), check, credit=settings
    )  # and its end: 9 tokens


def test_invalid_replies_are_counted_and_valid_ones_are_kept() -> None:
    def answer(n: int, body: Reply) -> Reply | int:
        changes: list[dict[str, object]] = [
            {},
            {"routed_experts": "AAAA"},
            {"routed_experts": routes(body, 4, experts=(0, 0))},
            {"weight_version": "default"},
        ]
        return reply(body, "046", **changes[n]) if n < 4 else 503

    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and len(message.group.rollouts) == 1
        reasons = ("routes_length", "routes_duplicate", "version", "engine")
        assert message.group.rejections == dict.fromkeys(reasons, 1)
        # 046 and its end, also of replies that the decoder rejects. An error has none
        tokens = dict.fromkeys(("routes_length", "routes_duplicate", "version"), 4)
        assert message.group.rejected_tokens == tokens
        assert message.generated_tokens == 4 * 4

    collect(answer, request(5), check)


def test_tokens_of_a_reply_that_is_sampled_again_are_counted() -> None:
    """A second engine serves the rollout, so that none is lost, but its first tokens are."""

    def invalid(n: int, body: Reply) -> Reply:
        return reply(body, "046046", output_token_logprobs=[])

    messages: list[FromCollector] = []

    async def run() -> None:
        async with (
            fake_engine(invalid) as bad_url,
            fake_engine(lambda n, body: reply(body, "046")) as good_url,
        ):
            outbox = Outbox()
            collector = Collector(0, configuration(), outbox.put)
            await collector.handle(serving(bad_url, good_url))
            await collector.handle(request(1))
            messages.append(await asyncio.wait_for(outbox.get(), 30))
            await collector.close()

    asyncio.run(run())
    (message,) = messages
    assert isinstance(message, GroupDone) and message.group.rejections == {}
    (sample,) = message.group.rollouts
    assert sample.num_generated == 4
    assert message.group.rejected_tokens == {"logprobs_length": 7}
    assert message.generated_tokens == 4 + 7


@pytest.mark.slow
def test_tokens_before_and_in_a_rejected_reply_are_counted(own_module: str) -> None:
    """The first turn is valid, and both attempts of the second one are not."""

    def answer(n: int, body: Reply) -> Reply:
        return reply(body, "047", **({"routed_experts": "AAAA"} if n else {}))

    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone)
        assert message.group.rejections == {"routes_length": 1}
        assert message.group.rejected_tokens == {"routes_length": 8}
        assert message.generated_tokens == 8

    collect(answer, request(1), check, EnvironmentSettings(name=f"{own_module}:SecondChance"))


@pytest.mark.parametrize("version", ["9" * 5000, "1" + "0" * 30, "-1", "1.5", ""])
def test_an_invalid_weight_version_is_a_rejection(version: str) -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.group.rejections == {"version": 2}
        msgspec.msgpack.encode(message)

    collect(lambda n, body: reply(body, "046", weight_version=version), request(2), check)


def test_a_token_outside_of_the_vocabulary_is_a_rejection() -> None:
    def strange(n: int, body: Reply) -> Reply:
        token = (-5, 48, 2**40)[n]
        altered_reply = reply(
            body, "046", output_token_logprobs=[(-0.5, t, None) for t in (token, EOS)]
        )
        return altered_reply | {"output_ids": [token, EOS]}

    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.group.rejections == {"token_range": 3}

    collect(strange, request(3), check)


def seeds(run_seed: int) -> list[int]:
    """Return the seeds of two rollouts of a group, in a run with this seed."""
    seeds_by_rid: dict[str, int] = {}

    def answer(n: int, body: Reply) -> Reply:
        seeds_by_rid[body["rid"].partition("#")[0]] = body["sampling_params"]["sampling_seed"]
        return reply(body, "046")

    collect(answer, request(2), lambda message, collector: None, seed=run_seed)
    return [seeds_by_rid["g/0"], seeds_by_rid["g/1"]]


def test_seeds_of_requests_are_derived_from_the_seed_of_the_run() -> None:
    first = seeds(7)
    other = seeds(8)
    assert first == seeds(7) and len({*first, *other}) == 4
    assert all(0 <= seed < 2**63 for seed in first)  # the range of the engine


@pytest.mark.slow
def test_every_turn_has_another_seed(own_module: str) -> None:
    turn_seeds: list[int] = []

    def answer(n: int, body: Reply) -> Reply:
        turn_seeds.append(body["sampling_params"]["sampling_seed"])
        return reply(body, "046" if n else "047")

    environment = EnvironmentSettings(name=f"{own_module}:SecondChance")
    collect(answer, request(1), lambda message, collector: None, environment)
    assert len(set(turn_seeds)) == 2


@pytest.mark.parametrize("are_long", [True, False])
def test_long_replies_are_decoded_checked_and_stored_in_threads(
    are_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long response has tens of megabytes. On the event loop it would delay the heartbeat."""
    text = "0" * 1000 if are_long else "046"
    group_request = msgspec.structs.replace(
        request(1), sampling=msgspec.structs.replace(SAMPLING, max_new_tokens=1024)
    )
    thread_names: dict[str, str] = {}
    functions = (
        "sglang_bridge.client.decode_generation",
        "megatron_rl.environments.rollout_builder.validate_routes",
    )
    for name in (*functions, "megatron_rl.rollouts.wire.codec.encode"):
        module, _, function = name.rpartition(".")
        original = getattr(sys.modules[module], function)

        def record_thread(
            *args: object,
            name: str = name,
            original: Callable[..., object] = original,
            **rest: object,
        ) -> object:
            thread_names[name] = threading.current_thread().name
            return original(*args, **rest)

        monkeypatch.setattr(name, record_thread)
    collect(lambda n, body: reply(body, text), group_request, lambda message, collector: None)
    assert len(thread_names) == 3
    in_threads = {name for name, thread in thread_names.items() if thread.startswith("replies")}
    assert in_threads == (
        set(thread_names) if are_long else {"megatron_rl.rollouts.wire.codec.encode"}
    )


def test_requests_of_a_silent_engine_are_aborted_and_go_to_the_next_one() -> None:
    """Rank 0 names the next engine once it serves."""
    messages: list[FromCollector] = []

    async def run() -> None:
        async with (
            fake_engine(lambda n, body: None) as url,
            fake_engine(lambda n, body: reply(body, "046")) as next_url,
        ):
            outbox = Outbox()
            settings = EngineSettings(request_timeout_s=0.1)
            collector = Collector(
                0, msgspec.structs.replace(configuration(), engine=settings), outbox.put
            )
            await collector.handle(serving(url))
            await collector.handle(request(2))
            # The deadline is 1.7 seconds, and the abort gets no more
            async with asyncio.timeout(8):
                while not any(isinstance(message, EngineLeftOut) for message in messages):
                    messages.append(await outbox.get())
            await collector.handle(serving(next_url))
            async with asyncio.timeout(30):
                while not isinstance(messages[-1], GroupDone):
                    messages.append(await outbox.get())
            await collector.close()

    asyncio.run(run())
    *reports, message = messages
    aborts = [name for m in reports if isinstance(m, AbortRequests) for name in m.names]
    assert set(map(short_name, aborts)) == {"g/0#0;", "g/1#1;"}
    assert sum(isinstance(m, EngineLeftOut) for m in reports) == 1
    assert isinstance(message, GroupDone) and len(message.group.rollouts) == 2


def test_responses_of_another_version_than_rank_0_has_set_are_not_used() -> None:
    async def run() -> GroupDone:
        async with (
            fake_engine(lambda n, body: reply(body, "047", weight_version="2")) as stale_url,
            fake_engine(lambda n, body: reply(body, "046")) as url,
        ):
            outbox = Outbox()
            collector = Collector(0, configuration(), outbox.put)
            await collector.handle(serving(stale_url, url, version=3))
            await collector.handle(request(2))
            message = await asyncio.wait_for(outbox.get(), 30)
            await collector.close()
            assert isinstance(message, GroupDone)
            return message

    group = asyncio.run(run()).group
    assert [rollout.versions for rollout in group.rollouts] == [(3,), (3,)]
    assert set(group.rejected_tokens) == {"stale"}


def test_an_evaluation_requests_no_routes_and_keeps_no_rollouts() -> None:
    def answer(n: int, body: Reply) -> Reply:
        assert body["return_routed_experts"] is False
        return reply(body, "046")

    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone)
        (sample,) = message.group.rollouts
        assert sample.verdict.correctness == 1.0 and sample.location.nbytes == 0
        with pytest.raises(RolloutGone):
            read_rollout(sample)

    # Demonstrations are for training: in an evaluation the model answers
    for name in ("single_turn", "demonstration"):
        environment = EnvironmentSettings(name=name)  # type: ignore[arg-type]
        collect(answer, request(1, evaluation=True), check, environment)


def test_demonstrations_need_no_engine() -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.generated_tokens == 0
        (sample,) = message.group.rollouts
        assert (
            sample.versions == ()
            and sample.num_trainable == 4
            and sample.verdict.correctness == 1.0
        )
        assert read_rollout(sample).routes is None

    collect(
        lambda n, body: 503,
        request(1),
        check,
        EnvironmentSettings(name="demonstration"),
        routes=None,
    )


ENVIRONMENTS = """
import asyncio

class SecondChance:
    async def play(self, episode):
        response = await episode.respond()
        if episode.prompt.answer not in response.text:
            episode.observe("no,")
            await episode.respond()

class Forgetful:
    async def play(self, episode):
        await episode.respond()
        await asyncio.sleep(3600)

class Silent:
    async def play(self, episode):
        pass

class Broken:
    async def play(self, episode):
        await episode.respond()
        raise KeyError("the tool")
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_environments", raising=False)
    return "user_environments"


@pytest.mark.slow
def test_a_user_defined_environment_with_two_turns(own_module: str) -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.group.rejections == {}
        (sample,) = message.group.rollouts
        rollout = read_rollout(sample)
        assert [s.role for s in rollout.segments] == [
            Role.PROMPT,
            Role.RESPONSE,
            Role.TOOL,
            Role.RESPONSE,
        ]
        assert (
            rollout.routes is not None
            and len(rollout.routes) == rollout.num_tokens - 1 == sample.num_inputs
        )
        assert sample.num_trainable == message.generated_tokens == 8
        assert sample.verdict.reward == 1.0

    collect(
        lambda n, body: reply(body, "047" if n == 0 else "046"),
        request(1),
        check,
        EnvironmentSettings(name=f"{own_module}:SecondChance"),
    )


@pytest.mark.slow
def test_an_exception_of_an_environment_rejects_its_rollout(
    own_module: str, caplog: pytest.LogCaptureFixture
) -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.group.rejections == {"environment": 2}
        assert message.generated_tokens == 8
        assert caplog.text.count("KeyError: 'the tool'") == 1  # one traceback
        error = message.group.environment_error
        assert error.startswith("user_environments.py:") and error.endswith("KeyError: 'the tool'")

    collect(
        lambda n, body: reply(body, "046"),
        request(2),
        check,
        EnvironmentSettings(name=f"{own_module}:Broken"),
    )


@pytest.mark.slow
def test_an_environment_is_ended_by_its_timeout(
    own_module: str, caplog: pytest.LogCaptureFixture
) -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.group.rejections == {"environment": 2}
        assert "the environment took longer than environment.timeout_s=0.2" in caplog.text
        assert "environment.timeout_s=0.2" in message.group.environment_error

    environment = EnvironmentSettings(name=f"{own_module}:Forgetful", timeout_s=0.2)
    collect(lambda n, body: reply(body, "046"), request(2), check, environment)


@pytest.mark.slow
def test_an_environment_that_requests_no_response_is_named(own_module: str) -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, GroupDone) and message.group.rejections == {"no_response": 2}
        assert "requested no response" in message.group.environment_error

    environment = EnvironmentSettings(name=f"{own_module}:Silent")
    collect(lambda n, body: reply(body, "046"), request(2), check, environment)


@pytest.mark.slow
def test_waiting_for_responses_does_not_count_for_the_timeout(own_module: str) -> None:
    def check(message: FromCollector, collector: Collector) -> None:
        assert (
            isinstance(message, GroupDone)
            and message.group.rejections == {}
            and len(message.group.rollouts) == 1
        )

    environment = EnvironmentSettings(name=f"{own_module}:SecondChance", timeout_s=0.5)
    collect(
        lambda n, body: reply(body, "046" if n else "047"),
        request(1),
        check,
        environment,
        seconds=0.8,
    )


def test_a_group_that_cannot_be_stored_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(*_: object) -> int:
        raise OSError(24, "Too many open files")

    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, Problem) and "Too many open files" in message.text

    monkeypatch.setattr("os.memfd_create", no_descriptors)
    collect(lambda n, body: reply(body, "046"), request(1), check)


def test_messages_that_come_twice_change_nothing() -> None:
    """A running response goes on, and what is dropped stays so."""

    num_requests = 0

    def answer(n: int, body: Reply) -> Reply:
        nonlocal num_requests
        num_requests += 1
        return reply(body, "046")

    async def run() -> list[FromCollector]:
        async with fake_engine(answer, seconds=0.5) as url:
            outbox = Outbox()
            collector = Collector(0, configuration(), outbox.put)
            await collector.handle(serving(url, version=3))
            await collector.handle(request(1))
            await asyncio.sleep(0.2)
            for _ in range(2):
                await collector.handle(serving(url, version=3))
            messages = [await asyncio.wait_for(outbox.get(), 30)]
            for message in (Drop(("g",)), Drop(("g",), is_reported=True), serving(is_paused=True)):
                await collector.handle(message)
                await collector.handle(message)
            messages += [await asyncio.wait_for(outbox.get(), 30) for _ in range(2)]
            assert outbox.empty()
            await collector.close()
            return messages

    done, *answers = asyncio.run(run())
    assert isinstance(done, GroupDone) and len(done.group.rollouts) == 1
    assert num_requests == 1, "the engine stayed as it was"
    assert all(isinstance(answer, Served) and answer.number == 1 for answer in answers)


def test_a_collector_reports_how_many_rollouts_need_an_engine() -> None:
    """The second response ends once the end of the first one is reported, and so on."""
    reports = [asyncio.Event() for _ in range(2)]

    async def late(n: int, body: Reply) -> Reply:
        await reports[n - 1].wait()
        return reply(body, "046")

    def answer(n: int, body: Reply) -> Awaitable[Reply] | Reply:
        return late(n, body) if n else reply(body, "046")

    async def run() -> None:
        async with fake_engine(answer) as url:
            outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
            collector = Collector(0, configuration(), outbox.put)
            await collector.handle(serving(url))
            await collector.handle(msgspec.structs.replace(request(3), attempt=7))
            for report, demand in zip(reports, (2, 1), strict=True):
                assert await asyncio.wait_for(outbox.get(), 30) == Alive({"g": (7, demand)})
                report.set()
            message = await asyncio.wait_for(outbox.get(), 30)
            if message == Alive({"g": (7, 0)}):  # it may come before the group
                message = await asyncio.wait_for(outbox.get(), 30)
            assert isinstance(message, GroupDone) and len(message.group.rollouts) == 3
            await collector.close()

    asyncio.run(run())
