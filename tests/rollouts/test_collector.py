"""The collector against a small HTTP server that answers as an engine does."""

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
from megatron_rl.rollouts.collector import Collector
from megatron_rl.rollouts.messages import (
    AbortRequest,
    Configure,
    Failed,
    FromCollector,
    GroupDone,
    GroupRequest,
    Release,
)
from megatron_rl.rollouts.store import RolloutGone, read_rollout
from tests.support.fake_engine import Answer, Reply, configuration, fake_engine, reply, routes
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
    asked: GroupRequest,
    check: Callable[[FromCollector, Collector], Awaitable[None] | None],
    environment: EnvironmentSettings | None = None,
    seconds: float = 0.01,
    **changes: object,
) -> None:
    """Ask a collector for one group, and look at its message while the rollouts are there."""

    async def run() -> None:
        async with fake_engine(answer, seconds=seconds) as url:
            outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
            configured: Configure = msgspec.structs.replace(
                configuration(url, environment=environment), **changes
            )
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


@pytest.mark.parametrize(("ngram", "share"), [(2, 7 / 9 - 0.02), (9, 0.0), (None, 0.0)])
def test_what_repeats_itself_is_measured_where_it_is_asked_for(
    ngram: int | None, share: float
) -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone)
        assert [sample.repetition for sample in done.group.rollouts] == [pytest.approx(share)]

    settings = CreditSettings(repetition_ngram=ngram)
    collect(
        lambda n, asked: reply(asked, "44444444"), request(1), check, credit=settings
    )  # and its end: 9 tokens


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
        assert done.group.rejections == dict.fromkeys(reasons, 1)
        assert (
            done.generated_tokens == 4 * 4
        )  # what was generated and then rejected counts: 046 and its end

    collect(broken, request(6), check)


@pytest.mark.parametrize("version", ["9" * 5000, "1" + "0" * 30, "-1", "1.5", ""])
def test_a_weight_version_that_is_no_number_of_syncs_is_counted(version: str) -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.group.rejections == {"version": 2}
        msgspec.msgpack.encode(done)

    collect(lambda n, asked: reply(asked, "046", weight_version=version), request(2), check)


def test_a_token_outside_the_vocabulary_is_counted_not_raised() -> None:
    def strange(n: int, asked: Reply) -> Reply:
        token = (-5, 48, 2**40)[n]
        changed = reply(asked, "046", output_token_logprobs=[(-0.5, t, None) for t in (token, EOS)])
        return changed | {"output_ids": [token, EOS]}

    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.group.rejections == {"token_range": 3}

    collect(strange, request(3), check)


def seeds(run_seed: int) -> list[int]:
    """What two samples of a group were drawn by, in a run with this seed."""
    drawn: dict[str, int] = {}

    def answer(n: int, asked: Reply) -> Reply:
        drawn[asked["rid"].partition("#")[0]] = asked["sampling_params"]["sampling_seed"]
        return reply(asked, "046")

    collect(answer, request(2), lambda done, collector: None, seed=run_seed)
    return [drawn["g/0"], drawn["g/1"]]


def test_every_request_s_seed_follows_from_the_run_s() -> None:
    first, other = seeds(7), seeds(8)
    assert first == seeds(7) and len({*first, *other}) == 4
    assert all(0 <= seed < 2**63 for seed in first)  # the engine takes no more


def test_every_turn_has_a_seed_of_its_own(own: str) -> None:
    drawn: list[int] = []

    def answer(n: int, asked: Reply) -> Reply:
        drawn.append(asked["sampling_params"]["sampling_seed"])
        return reply(asked, "046" if n else "047")

    environment = EnvironmentSettings(name=f"{own}:SecondChance")
    collect(answer, request(1), lambda done, collector: None, environment)
    assert len(set(drawn)) == 2


def test_replies_are_read_checked_and_stored_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long response is tens of megabytes: on the loop it would hold up every other request, and
    the heartbeat.
    """
    where: dict[str, str] = {}
    works = (
        "sglang_bridge.client.decode_generation",
        "megatron_rl.environments.rollout_builder.validate_routes",
    )
    for name in (*works, "megatron_rl.rollouts.codec.encode"):
        module, _, function = name.rpartition(".")
        original = getattr(sys.modules[module], function)

        def noted(
            *args: object,
            name: str = name,
            original: Callable[..., object] = original,
            **rest: object,
        ) -> object:
            where[name] = threading.current_thread().name
            return original(*args, **rest)

        monkeypatch.setattr(name, noted)
    collect(lambda n, asked: reply(asked, "046"), request(1), lambda done, collector: None)
    assert len(where) == 3 and all(thread.startswith("replies") for thread in where.values())


def test_a_silent_engine_s_samples_are_counted_as_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_bridge.client._ABORT_SECONDS", 0.05)
    told: list[FromCollector] = []

    async def run() -> None:
        async with fake_engine(lambda n, asked: None) as url:
            outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
            impatient = EngineSettings(request_timeout_s=0.1, token_timeout_s=0.01, retries=0)
            collector = Collector(
                0, msgspec.structs.replace(configuration(url), engine=impatient), outbox.put
            )
            await collector.handle(request(2))
            told.extend([await asyncio.wait_for(outbox.get(), 5) for _ in range(3)])
            await collector.close()

    asyncio.run(run())
    *aborts, done = told
    assert sorted(m.rid for m in aborts if isinstance(m, AbortRequest)) == ["g/0#0;", "g/1#1;"]
    assert isinstance(done, GroupDone) and done.group.rejections == {"expired": 2}


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

    for name in (
        "single_turn",
        "demonstration",
    ):  # worked responses are for training: here the model answers
        collect(answer, request(1, evaluation=True), check, EnvironmentSettings(name=name))  # type: ignore[arg-type]


def test_worked_responses_need_no_engine() -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.generated_tokens == 0
        (sample,) = done.group.rollouts
        assert (
            sample.versions == ()
            and sample.num_trainable == 4
            and sample.verdict.correctness == 1.0
        )
        assert read_rollout(sample).routes is None

    collect(
        lambda n, asked: 503,
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
        assert isinstance(done, GroupDone) and done.group.rejections == {}
        (sample,) = done.group.rollouts
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
        assert sample.num_trainable == done.generated_tokens == 8
        assert sample.verdict.reward == 1.0

    collect(
        lambda n, asked: reply(asked, "047" if n == 0 else "046"),
        request(1),
        check,
        EnvironmentSettings(name=f"{own}:SecondChance"),
    )


def test_an_exception_of_an_environment_rejects_its_rollout(
    own: str, caplog: pytest.LogCaptureFixture
) -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.group.rejections == {"environment": 2}
        assert done.generated_tokens == 8
        assert caplog.text.count("KeyError: 'the tool'") == 1  # its traceback, once

    collect(
        lambda n, asked: reply(asked, "046"),
        request(2),
        check,
        EnvironmentSettings(name=f"{own}:Broken"),
    )


def test_an_environment_that_never_ends_is_ended(
    own: str, caplog: pytest.LogCaptureFixture
) -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert isinstance(done, GroupDone) and done.group.rejections == {"environment": 2}
        assert "the environment took longer than environment.timeout_s=0.2" in caplog.text

    environment = EnvironmentSettings(name=f"{own}:Forgetful", timeout_s=0.2)
    collect(lambda n, asked: reply(asked, "046"), request(2), check, environment)


def test_waiting_for_a_response_is_not_the_environment_s_time(own: str) -> None:
    def check(done: FromCollector, collector: Collector) -> None:
        assert (
            isinstance(done, GroupDone)
            and done.group.rejections == {}
            and len(done.group.rollouts) == 1
        )

    environment = EnvironmentSettings(name=f"{own}:SecondChance", timeout_s=0.5)
    collect(
        lambda n, asked: reply(asked, "046" if n else "047"),
        request(1),
        check,
        environment,
        seconds=0.8,
    )


def test_a_group_that_cannot_be_stored_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(*_: object) -> int:
        raise OSError(24, "Too many open files")

    def check(message: FromCollector, collector: Collector) -> None:
        assert isinstance(message, Failed) and "Too many open files" in message.reason

    monkeypatch.setattr("os.memfd_create", no_descriptors)
    collect(lambda n, asked: reply(asked, "046"), request(1), check)
