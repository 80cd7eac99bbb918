"""A scorer or an environment that ignores its cancellation costs its rollout, not the run."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import EnvironmentSettings, RewardSettings, RolloutSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.wire.messages import (
    FromCollector,
    GroupDone,
    GroupRequest,
    Problem,
)
from megatron_rl.rollouts.wire.rejections import UserClassFailed, count_unusable
from tests.support.collectors import Outbox
from tests.support.fake_engine import configuration, fake_engine, reply, serving
from tests.support.scripted_model import EOS, PROMPT

pytestmark = pytest.mark.slow

CLASSES = """
import asyncio

from megatron_rl.contracts.group import Verdict

class Retries:
    def check_answer(self, question):
        pass

    async def score(self, prompt, text, finish_reason):
        if "047" in text:
            return Verdict(reward=0.0, correctness=0.0)
        while True:
            try:
                await asyncio.sleep(3600)
            except:
                await asyncio.sleep(0.01)


class Stubborn:
    async def play(self, episode):
        await episode.respond()
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                pass


class RespondsAnyway:
    async def play(self, episode):
        while True:
            try:
                await episode.respond()
                await asyncio.sleep(3600)
            except BaseException:
                pass


class RespondsForever:
    async def play(self, episode):
        while True:
            await episode.respond()


class CancelsItself:
    async def play(self, episode):
        await episode.respond()
        task = asyncio.create_task(asyncio.sleep(3600))
        task.cancel()
        await task


class Exits:
    def check_answer(self, question):
        pass

    async def score(self, prompt, text, finish_reason):
        raise SystemExit(3)

    async def play(self, episode):
        raise SystemExit(3)
"""
IGNORED = "timeout: the scorer ignored its cancellation"
SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))


@pytest.fixture(autouse=True)
def user_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stubborn.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stubborn", raising=False)
    monkeypatch.setattr("megatron_rl.rollouts.user_process.user_classes._GRACE_SECONDS", 0.2)


def collect(
    num_samples: int,
    *,
    scorer: str = "",
    environment: str = "",
    timeout_s: float = 0.1,
) -> list[FromCollector]:
    """The messages of a collector until it has answered one request."""

    async def run() -> list[FromCollector]:
        async with fake_engine(lambda n, body: reply(body, "046" if n else "047")) as url:
            outbox = Outbox()
            settings = msgspec.structs.replace(
                configuration(),
                rollout=RolloutSettings(max_new_tokens=16),
                reward=RewardSettings(name=scorer or "exact_match", timeout_s=0.1),
                environment=EnvironmentSettings(
                    name=environment or "single_turn", timeout_s=timeout_s
                ),
            )
            collector = Collector(0, settings, outbox.put)
            await collector.handle(serving(url))
            request = GroupRequest(
                group_id="g", prompt=PROMPT, num_samples=num_samples, sampling=SAMPLING
            )
            await collector.handle(request)
            messages: list[FromCollector] = []
            while not messages or isinstance(messages[-1], Problem):
                messages.append(await asyncio.wait_for(outbox.get(), 60))
            await collector.close()
            return messages

    return asyncio.run(run())


def group_of(messages: list[FromCollector]) -> Group:
    message = messages[-1]
    assert isinstance(message, GroupDone)
    return message.group


def warnings_of(messages: list[FromCollector]) -> list[str]:
    return [message.text for message in messages if isinstance(message, Problem)]


def test_a_scorer_that_ignores_its_cancellation_gives_no_verdict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages = collect(4, scorer="stubborn:Retries")
    group = group_of(messages)
    reasons = [r.verdict.reason for r in group.rollouts if r.verdict.reward is None]
    assert (len(group.rollouts), reasons) == (4, [IGNORED] * 3)
    assert count_unusable([group]) == {"no_verdict": 3}
    metrics = RolloutBatch(groups=(group,), generated_tokens=16).metrics()
    assert metrics["reward/no_verdict"] == 3.0
    first, second = warnings_of(messages)  # those with the numbers 1 and 2
    assert first.startswith("reward.name=stubborn:Retries: a call ignored its cancellation")
    assert "group g, rollout " in first and "number 1" in first and "number 2" in second
    assert caplog.text.count("is replaced when no other call runs in it (group g, rollout ") == 3


@pytest.mark.parametrize(
    "name", ["Stubborn", pytest.param("RespondsAnyway", marks=pytest.mark.nightly)]
)
def test_an_environment_that_ignores_its_cancellation_is_rejected(name: str) -> None:
    messages = collect(2, environment=f"stubborn:{name}")
    group = group_of(messages)
    assert group.rejections == {"environment": 2}
    assert "ignored its cancellation after environment.timeout_s=0.1" in group.environment_error
    assert warnings_of(messages)[0].startswith(f"environment.name=stubborn:{name}: ")
    with pytest.raises(UserClassFailed, match=r"2 of 2 .*, or took longer than .*ignored"):
        RolloutBatch(groups=(group,), generated_tokens=8).require("step-1")


def test_an_environment_that_cancels_itself_is_rejected() -> None:
    group = group_of(collect(2, environment="stubborn:CancelsItself"))
    assert group.rejections == {"environment": 2}
    assert group.environment_error == "the environment cancelled itself"


@pytest.mark.timeout(60)
def test_an_environment_that_requests_responses_forever_is_rejected() -> None:
    group = group_of(collect(2, environment="stubborn:RespondsForever", timeout_s=20.0))
    assert group.rejections == {"endless": 2}
    assert "requested 100 responses after its token budget was used up" in group.environment_error
    with pytest.raises(UserClassFailed, match=r"2 of 2 .*\(2 endless \(the environment "):
        RolloutBatch(groups=(group,), generated_tokens=8).require("step-1")


@pytest.mark.nightly
def test_system_exit_of_user_code_does_not_end_the_collector() -> None:
    group = group_of(collect(2, environment="stubborn:Exits"))
    assert group.rejections == {"environment": 2}
    assert group.environment_error == "stubborn.py:62, in play: RuntimeError: it called sys.exit(3)"
    group = group_of(collect(2, scorer="stubborn:Exits"))
    assert count_unusable([group]) == {"no_verdict": 2}
    assert group.rollouts[0].verdict.reason.endswith(
        "in score: RuntimeError: it called sys.exit(3)"
    )
