"""The collector against a small HTTP server that answers as an engine does."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import EngineSettings, EnvironmentSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import FinishReason, Role
from megatron_rl.rollouts.collector import Collector
from megatron_rl.rollouts.engine_pool import EnginePool
from megatron_rl.rollouts.messages import Configure, Failed, FromCollector, GroupDone, GroupRequest, Release
from megatron_rl.rollouts.store import RolloutGone, read_rollout
from sglang_bridge.engine import Engine
from support.fake_engine import Answer, Reply, configuration, fake_engine, reply, routes
from support.scripted_model import EOS, PROMPT

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))


def request(num_samples: int, *, evaluation: bool = False) -> GroupRequest:
    return GroupRequest(group_id="g", prompt=PROMPT, num_samples=num_samples, sampling=SAMPLING, evaluation=evaluation)


def collect(
    answer: Answer,
    asked: GroupRequest,
    check: Callable[[FromCollector, Collector], Awaitable[None] | None],
    environment: EnvironmentSettings | None = None,
    **changes: object,
) -> None:
    """Ask a collector for one group, and look at its message while the rollouts are there."""

    async def run() -> None:
        async with fake_engine(answer) as url:
            outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
            configured: Configure = msgspec.structs.replace(configuration(url, environment=environment), **changes)
            collector = Collector(0, configured, outbox.put)
            assert await collector.handle(asked)
            pending = check(await asyncio.wait_for(outbox.get(), 5), collector)
            if pending is not None:
                await pending
            await collector.close()

    asyncio.run(run())


def test_samples_are_judged_and_kept_until_released() -> None:
    async def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.generated_tokens == 8
        samples = done.group.rollouts
        assert sorted(s.verdict.reward or 0.0 for s in samples) == [0.0, 1.0]
        assert all(s.versions == (3,) and s.finish_reason is FinishReason.STOP for s in samples)
        rollout = read_rollout(samples[0])
        assert rollout.routes is not None and rollout.routes.shape == (samples[0].num_inputs, 4, 2)
        assert rollout.routes.dtype == np.uint8
        await collector.handle(Release(("g",)))
        with pytest.raises(RolloutGone):
            read_rollout(samples[0])

    collect(lambda n, asked: reply(asked, "046" if n else "047"), request(2), check)


def test_bad_samples_are_counted_and_the_others_live() -> None:
    def broken(n: int, asked: Reply) -> Reply | int:
        changes: list[dict[str, object]] = [
            {},
            {"routed_experts": "AAAA"},
            {"routed_experts": routes(asked, 4, experts=(0, 0))},
            {"weight_version": "default"},
            {"finish_reason": {"type": "abort"}},
        ]
        return reply(asked, "046", **changes[n]) if n < 5 else 503

    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and len(done.group.rollouts) == 1
        reasons = ("routes_length", "routes_duplicate", "version", "aborted", "engine")
        assert done.group.rejected == dict.fromkeys(reasons, 1)
        assert done.generated_tokens == 4 * 4  # what was generated and then rejected counts: 046 and its end

    collect(broken, request(6), check)


def test_an_evaluation_asks_for_no_routes_and_keeps_nothing() -> None:
    def answer(n: int, asked: Reply) -> Reply:
        assert asked["return_routed_experts"] is False
        return reply(asked, "046")

    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone)
        (sample,) = done.group.rollouts
        assert sample.verdict.correctness == 1.0 and sample.location.nbytes == 0
        with pytest.raises(RolloutGone):
            read_rollout(sample)

    for name in ("single_turn", "worked"):  # worked responses are for training: here the model answers
        collect(answer, request(1, evaluation=True), check, EnvironmentSettings(name=name))  # type: ignore[arg-type]


def test_worked_responses_need_no_engine() -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.generated_tokens == 0
        (sample,) = done.group.rollouts
        assert sample.versions == () and sample.num_trainable == 4 and sample.verdict.correctness == 1.0
        assert read_rollout(sample).routes is None

    collect(lambda n, asked: 503, request(1), check, EnvironmentSettings(name="worked"), routes=None)


ENVIRONMENTS = """
class SecondChance:
    async def play(self, episode):
        response = await episode.respond()
        if episode.prompt.answer not in response.text:
            episode.observe("no,")
            await episode.respond()

class Broken:
    async def play(self, episode):
        await episode.respond()
        raise KeyError("the tool")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_environments", raising=False)
    return "own_environments"


def test_an_environment_of_ones_own_has_two_turns(own: str) -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.group.rejected == {}
        (sample,) = done.group.rollouts
        rollout = read_rollout(sample)
        assert [s.role for s in rollout.segments] == [Role.PROMPT, Role.RESPONSE, Role.TOOL, Role.RESPONSE]
        assert rollout.routes is not None and len(rollout.routes) == rollout.num_tokens - 1 == sample.num_inputs
        assert sample.num_trainable == done.generated_tokens == 8
        assert sample.verdict.reward == 1.0

    collect(
        lambda n, asked: reply(asked, "047" if n == 0 else "046"),
        request(1),
        check,
        EnvironmentSettings(name=f"{own}:SecondChance"),
    )


def test_an_exception_of_an_environment_rejects_its_rollout(own: str, caplog: pytest.LogCaptureFixture) -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.group.rejected == {"environment": 2}
        assert done.generated_tokens == 8
        assert caplog.text.count("KeyError: 'the tool'") == 1  # its traceback, once

    collect(lambda n, asked: reply(asked, "046"), request(2), check, EnvironmentSettings(name=f"{own}:Broken"))


def test_a_group_that_cannot_be_stored_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(*_: object) -> int:
        raise OSError(24, "Too many open files")

    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, Failed) and "Too many open files" in message.reason

    monkeypatch.setattr("os.memfd_create", no_descriptors)
    collect(lambda n, asked: reply(asked, "046"), request(1), check)


def test_requests_in_flight_are_bounded() -> None:
    flying, most = 0, 0

    async def run() -> None:
        async with fake_engine(lambda n, asked: reply(asked, "046")) as url:
            settings = EngineSettings(max_running_requests=2, retries=0)
            pool = EnginePool([Engine(url=url)], settings, api_key=None, route_shape=(4, 2))
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
            await asyncio.gather(
                *(pool.generate(PROMPT.token_ids, SAMPLING, rid=f"r{i}", return_routes=True) for i in range(10))
            )
            await pool.close()

    asyncio.run(run())
    assert most == 4  # two for each that runs
