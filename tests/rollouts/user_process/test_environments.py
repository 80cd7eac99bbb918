"""User-defined environments in processes: the same rollouts, and episodes that begin again."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import EnvironmentSettings, RolloutSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.environments.environment import open_environment
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.user_process import user_classes
from megatron_rl.rollouts.user_process.attempts import EpisodeAttempt
from megatron_rl.rollouts.user_process.messages import RespondAction, WithdrawAction
from megatron_rl.rollouts.wire.messages import AbortRequests, GroupDone, GroupRequest, Problem
from megatron_rl.rollouts.wire.store import read_rollout
from tests.support.collectors import Outbox
from tests.support.fake_engine import Answer, Reply, configuration, fake_engine, reply, serving
from tests.support.scripted_model import EOS, PROMPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
SAMPLING = Sampling(max_new_tokens=24, temperature=1.0, stop_token_ids=(EOS,))

ENVIRONMENTS = """
import asyncio
import os
import time

from megatron_rl.environments import Environment
from megatron_rl.models.tokenizer import UnknownText


class UsesEverything(Environment):
    async def play(self, episode):
        assert (episode.text, episode.finish_reason, episode.sampled_tokens) == ("", None, 0)
        response = await episode.respond()
        assert episode.text == response.text and episode.finish_reason == response.finish_reason
        assert episode.sampled_tokens == len(response.text) + 1
        episode.observe("no,")
        try:
            episode.observe("\\u2603")
        except UnknownText as error:
            assert "\\u2603" in str(error)
        try:
            episode.observe(5)
        except TypeError:
            pass
        await asyncio.to_thread(episode.observe, "0")
        episode.demonstrate("046")
        response = await asyncio.create_task(episode.respond())
        episode.observe("late")


class GivesUp(Environment):
    async def play(self, episode):
        for seconds in (0.05, 60):
            try:
                await asyncio.wait_for(episode.respond(), seconds)
            except asyncio.TimeoutError:
                episode.observe("no,")


class Fails(Environment):
    async def play(self, episode):
        await episode.respond()
        episode.observe("\\u2603")


class TooLong(Environment):
    async def play(self, episode):
        try:
            episode.demonstrate("0" * 100)
        except ValueError as error:
            self.error = error
            raise


class Blocks(Environment):
    async def play(self, episode):
        response = await episode.respond()
        if response.text == "047":
            await asyncio.sleep(0.5)
            time.sleep(3600)
        await asyncio.sleep(1.0)
        await episode.respond()


class Exits(Environment):
    async def play(self, episode):
        response = await episode.respond()
        if response.text == "047":
            os._exit(9)
        await asyncio.sleep(0.5)


class LeavesWorkBehind(Environment):
    async def play(self, episode):
        response = await episode.respond()
        if response.text == "047":
            for work in (self.observe_late, self.respond_late):
                self.task = asyncio.create_task(work(episode))
            return
        await asyncio.sleep(3.0)
        await episode.respond()

    async def observe_late(self, episode):
        await asyncio.sleep(0.3)
        try:
            episode.observe("late")
        except RuntimeError as error:
            print("refused:", error, flush=True)
        episode.observe("late again")

    async def respond_late(self, episode):
        while True:
            await asyncio.sleep(0.3)
            try:
                await episode.respond()
            except Exception:
                pass


class Overlaps(Environment):
    async def play(self, episode):
        await asyncio.gather(episode.respond(), episode.respond())


class ObservesMeanwhile(Environment):
    async def play(self, episode):
        response = asyncio.create_task(episode.respond())
        await asyncio.sleep(0)
        episode.observe("5")
        await response


class WithdrawsAtOnce(Environment):
    async def play(self, episode):
        response = asyncio.create_task(episode.respond())
        await asyncio.sleep(0)
        response.cancel()
        try:
            await response
        except asyncio.CancelledError:
            pass
        episode.observe("no,")
        await episode.respond()


class Garbage(Environment):
    async def play(self, episode):
        episode.observe_messages([{1: 2}])
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("megatron_rl.rollouts.user_process.user_classes._GRACE_SECONDS", 0.3)


def collect(
    name: str,
    answer: Answer,
    num_samples: int = 1,
    *,
    timeout_s: float = 20.0,
    routes: bool = True,
    seconds: float = 0.01,
) -> tuple[Group, list[Rollout], list[str]]:
    """Return a group, its rollouts and the warnings about calls."""
    warnings = []

    async def run() -> tuple[Group, list[Rollout]]:
        async with fake_engine(answer, seconds=seconds) as url:
            outbox = Outbox()
            environment = EnvironmentSettings(name=f"own_environments:{name}", timeout_s=timeout_s)
            settings = msgspec.structs.replace(
                configuration(environment),
                rollout=RolloutSettings(max_new_tokens=24),
            )
            if not routes:
                settings = msgspec.structs.replace(settings, routes=None)
            collector = Collector(0, settings, outbox.put)
            await collector.handle(serving(url))
            request = GroupRequest(
                group_id="g", prompt=PROMPT, num_samples=num_samples, sampling=SAMPLING
            )
            await collector.handle(request)
            try:
                while True:
                    message = await asyncio.wait_for(outbox.get(), 60)
                    if isinstance(message, GroupDone):
                        rollouts = [read_rollout(ref) for ref in message.group.rollouts]
                        return message.group, rollouts
                    # A response that is withdrawn is aborted on its engine
                    assert isinstance(message, Problem | AbortRequests), message
                    if isinstance(message, Problem):
                        warnings.append(message.text)
            finally:
                await collector.close()

    group, rollouts = asyncio.run(run())
    return group, rollouts, warnings


def contents(rollout: Rollout) -> list[object]:
    """Everything that a rollout holds, in a form that can be compared."""
    segments = [
        (
            segment.tokens.tolist(),
            segment.role,
            segment.trainable,
            None if segment.logprobs is None else segment.logprobs.tolist(),
            segment.route_rows,
            segment.version,
        )
        for segment in rollout.segments
    ]
    routes = None if rollout.routes is None else np.asarray(rollout.routes).tolist()
    return [rollout.rollout_id, rollout.prompt_id, rollout.finish_reason, segments, routes]


def test_a_rollout_of_a_process_equals_one_of_an_environment_in_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(n: int, body: Reply) -> Reply:
        return reply(body, ("047", "46")[n % 2])

    _, (in_process,), _ = collect("UsesEverything", answer)
    settings = EnvironmentSettings(name="own_environments:UsesEverything")
    monkeypatch.setattr(
        user_classes,
        "EnvironmentInProcess",
        lambda remote_class: user_classes.EnvironmentInThisProcess(open_environment(settings)),
    )
    _, (in_collector,), _ = collect("UsesEverything", answer)
    assert contents(in_process) == contents(in_collector)
    assert len(in_process.segments) == 6 and in_process.routes is not None


@pytest.mark.nightly
def test_a_response_that_an_environment_gives_up_is_no_part_of_the_rollout() -> None:
    bodies: list[Reply] = []

    def answer(n: int, body: Reply) -> Reply:
        bodies.append(body)
        return reply(body, "46")

    group, (rollout,), _ = collect("GivesUp", answer, seconds=0.6, routes=False)
    assert group.rejections == {} and len(bodies) == 2
    assert bodies[1]["input_ids"][: len(PROMPT.token_ids)] == list(PROMPT.token_ids)
    assert len(bodies[1]["input_ids"]) == len(PROMPT.token_ids) + 3  # `no,`
    assert len(rollout.segments) == 3


def test_an_exception_of_an_action_keeps_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    group, _, _ = collect("Fails", lambda n, body: reply(body, "46"))
    assert group.rejections == {"environment": 1}
    assert "UnknownText" in group.environment_error
    group, _, _ = collect("TooLong", lambda n, body: 503, routes=False)
    assert group.rejections == {"too_long": 1} and group.environment_error == ""
    group, _, _ = collect("Garbage", lambda n, body: 503)
    assert group.rejections == {"environment": 1}
    assert "TypeError: a message of a chat is a dict" in group.environment_error


def test_an_episode_begins_again_with_the_same_seeds_when_another_one_blocks() -> None:
    """Rollout 1 blocks. Rollout 0 has one response by then, which it loses."""
    seeds = Counter[int]()

    def answer(n: int, body: Reply) -> Reply:
        seeds[body["sampling_params"]["sampling_seed"]] += 1
        return reply(body, "047" if body["rid"].startswith("g/1#") else "46")

    group, (rollout,), warnings = collect("Blocks", answer, 2, timeout_s=5.0)
    assert group.rejections == {"environment": 1}
    assert rollout.sample_index == 0 and len(rollout.segments) == 3
    # 47 and its end, twice; 46 and its end
    assert group.rejected_tokens == {"environment": 4, "environment_restarted": 7}
    assert sorted(seeds.values()) == [1, 2, 2]
    assert "group g, rollout 1" in warnings[0]


def test_an_environment_that_ends_its_process_costs_its_own_rollout() -> None:
    group, rollouts, warnings = collect(
        "Exits", lambda n, body: reply(body, "047" if body["rid"].startswith("g/1#") else "46"), 3
    )
    assert group.rejections == {"environment": 1}
    assert "exit code 9" in group.environment_error
    assert [rollout.sample_index for rollout in rollouts] == [0, 2]
    assert "group g, rollout 1" in warnings[0]


def test_work_that_an_episode_leaves_behind_blocks_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each of its actions is refused, and the others have all their time."""

    def answer(n: int, body: Reply) -> Reply:
        return reply(body, "047" if body["rid"].startswith("g/1#") else "46")

    group, rollouts, warnings = collect("LeavesWorkBehind", answer, 4, timeout_s=4.0)
    assert group.rejections == {} and warnings == []
    assert [len(rollout.segments) for rollout in rollouts] == [3, 2, 3, 3]
    assert "refused: the call of this episode has ended" in capfd.readouterr().out


@pytest.mark.parametrize(
    "name", ["Overlaps", pytest.param("ObservesMeanwhile", marks=pytest.mark.nightly)]
)
def test_actions_that_overlap_are_refused(name: str) -> None:
    group, _, _ = collect(name, lambda n, body: reply(body, "46"))
    assert group.rejections == {"environment": 1}
    assert "ValueError: a response of this episode is pending" in group.environment_error


@pytest.mark.nightly
def test_a_response_that_is_withdrawn_at_once_is_no_part_of_the_rollout() -> None:
    """The collector may hear of its end first."""
    group, rollouts, _ = collect(
        "WithdrawsAtOnce", lambda n, body: reply(body, "46"), 8, seconds=1.0
    )
    assert group.rejections == {}
    assert [len(rollout.segments) for rollout in rollouts] == [3] * 8


def test_a_response_whose_withdrawal_arrives_first_is_not_requested() -> None:
    episode = SimpleNamespace(text="", finish_reason=None, sampled_tokens=0, rejected_tokens={})
    attempt = EpisodeAttempt(episode)  # type: ignore[arg-type]
    assert attempt.perform(WithdrawAction(1, 2)).error is None
    attempt.respond(RespondAction(1, 2), pytest.fail)  # a request would need an event loop
