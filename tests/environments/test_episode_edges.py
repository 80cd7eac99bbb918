"""Edge cases of episodes: identity, threads, small budgets, versions and dtypes."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.contracts.group import ENVIRONMENT_FAILURE
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.rollout_builder import RolloutRejected
from sglang_bridge.generation import Generation
from tests.environments.test_episode import play_turns
from tests.support.scripted_model import PROMPT, ROUTES, TOKENIZER, ScriptedModel, Turn

SAMPLING = Sampling(temperature=1.0, max_new_tokens=32)


RULES = EpisodeRules(sampling=SAMPLING, routes=None, train_truncated=True)


def test_rollout_has_the_ids_of_its_episode() -> None:
    model = ScriptedModel([Turn.saying("046")])
    episode = Episode(PROMPT, model.generate, TOKENIZER, RULES, rollout_id="q/5", sample_index=5)
    assert (episode.text, episode.finish_reason) == ("", None)
    asyncio.run(_respond(episode))
    rollout = episode.rollout()
    assert (rollout.rollout_id, rollout.prompt_id, rollout.sample_index) == ("q/5", "q", 5)
    first = Episode(PROMPT, model.generate, TOKENIZER, RULES, rollout_id="q/0")
    first.demonstrate("046")
    assert first.rollout().sample_index == 0


class CountingThreads(ThreadPoolExecutor):
    """Counts what it is given."""

    num_calls = 0

    def submit(self, *arguments: Any, **options: Any) -> Any:
        self.num_calls += 1
        return super().submit(*arguments, **options)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens", "num_calls"),
    [(6, 513, 1), (6, 512, 0), (11_000, 4, 1), (10_900, 4, 0)],
)
def test_long_responses_and_many_routes_are_checked_in_a_thread(
    num_prompt_tokens: int, num_tokens: int, num_calls: int
) -> None:
    """An input has 24 bytes of routes: 256 KiB of them belong to 10,922 inputs."""
    token_ids = (PROMPT.token_ids * num_prompt_tokens)[:num_prompt_tokens]
    prompt = msgspec.structs.replace(PROMPT, token_ids=token_ids)
    text = "0" * (num_tokens - 1)
    rules = replace(RULES, sampling=Sampling(temperature=1.0, max_new_tokens=1024))
    with CountingThreads(1) as threads:
        generate = ScriptedModel([Turn.saying(text)]).generate
        episode = Episode(prompt, generate, TOKENIZER, rules, rollout_id="q/0", threads=threads)
        asyncio.run(_respond(episode))
    assert threads.num_calls == num_calls
    assert episode.text == text and not episode.is_adding


class HeldThreads(ThreadPoolExecutor):
    """Holds what it is given in a thread until `release` is set."""

    def __init__(self) -> None:
        super().__init__(1)
        self.has_begun = Event()
        self.release = Event()

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Any:
        def call() -> Any:
            self.has_begun.set()
            self.release.wait(60)
            return function(*arguments, **options)

        return super().submit(call)


@pytest.mark.parametrize("routes", [None, ROUTES])
def test_a_response_withdrawn_while_a_thread_adds_it_is_no_part_of_the_rollout(
    routes: RouteShape | None,
) -> None:
    """Otherwise the thread adds it after text that its policy never saw."""
    model = ScriptedModel([Turn.saying("0" * 512), Turn.saying("4")])
    rules = replace(RULES, sampling=Sampling(temperature=1.0, max_new_tokens=1024), routes=routes)

    async def play(episode: Episode, threads: HeldThreads) -> None:
        withdrawn = asyncio.create_task(episode.respond())
        await asyncio.to_thread(threads.has_begun.wait, 60)
        withdrawn.cancel()
        episode.withdraw()
        episode.observe("5")
        threads.release.set()
        with pytest.raises(asyncio.CancelledError):
            await withdrawn
        threads.shutdown()
        await episode.respond()

    with HeldThreads() as threads:
        episode = Episode(
            PROMPT, model.generate, TOKENIZER, rules, rollout_id="q/0", threads=threads
        )
        asyncio.run(play(episode, threads))
    tokens = [token for segment in episode.rollout().segments for token in segment.tokens.tolist()]
    assert tokens == [*PROMPT.token_ids, *TOKENIZER.encode("54<eos>")]
    assert (episode.sampled_tokens, episode.text) == (2, "4")
    assert episode.rejected_tokens == {ENVIRONMENT_FAILURE: 513}


async def _respond(episode: Episode) -> None:
    await episode.respond()


def test_what_is_stored_of_a_rollout_ends_as_its_last_response_did() -> None:
    """The environment that plays it again asks for the empty turn again."""
    _, episode, _ = play_turns([Turn.saying("046")], "8", budget=5)
    assert (episode.text, episode.finish_reason) == ("", FinishReason.LENGTH)
    stored_rollout = episode.rollout_so_far(None)
    assert stored_rollout is not None
    assert stored_rollout.finish_reason is FinishReason.STOP


def test_one_token_of_budget_is_requested() -> None:
    cut = Turn(TOKENIZER.encode("0"), (("3", 1),), FinishReason.LENGTH)
    _, _, model = play_turns([cut], budget=1)
    assert model.requests == [(PROMPT.token_ids, 1)]


def test_retracted_request_reads_with_the_last_of_three_versions() -> None:
    turn = Turn(TOKENIZER.encode("046"), (("3", 1), ("4", 1), ("5", 1)), retractions=1)
    rollout, _, _ = play_turns([turn], routes=None)
    assert [segment.version for segment in rollout.segments] == [5, 3, 4, 5]


def test_tokens_are_32_bits_wide() -> None:
    rollout, _, _ = play_turns([Turn.saying("4"), Turn.saying("046")], "no")
    assert {segment.tokens.dtype for segment in rollout.segments} == {np.dtype(np.int32)}


def test_version_has_at_most_nine_digits() -> None:
    rollout, _, _ = play_turns([Turn.saying("4", version="999999999")])
    assert rollout.segments[1].version == 999_999_999
    with pytest.raises(RolloutRejected):
        play_turns([Turn.saying("4", version="1000000000")])


def test_actions_while_a_response_is_pending_are_refused() -> None:
    """Otherwise the rollout holds tokens that were sampled without the ones before them."""
    model = ScriptedModel([Turn.saying("4")] * 3)

    async def generate(token_ids: Sequence[int], sampling: Sampling) -> Generation:
        await asyncio.sleep(0)
        return await model.generate(token_ids, sampling)

    async def play(episode: Episode) -> None:
        first = asyncio.create_task(episode.respond())
        await asyncio.sleep(0)
        for act in (episode.observe, episode.demonstrate):
            with pytest.raises(ValueError, match="is pending"):
                act("3")
        with pytest.raises(ValueError, match="is pending"):
            await episode.respond()
        assert (await first).text == "4"
        cancelled = asyncio.create_task(episode.respond())
        await asyncio.sleep(0)
        cancelled.cancel()
        episode.withdraw()  # the collector hears of it before the task has ended
        episode.observe("5")
        await episode.respond()
        episode.observe("6")

    episode = Episode(PROMPT, generate, TOKENIZER, RULES, rollout_id="q/0")
    asyncio.run(play(episode))
    tokens = [token for segment in episode.rollout().segments for token in segment.tokens.tolist()]
    assert tokens == [*PROMPT.token_ids, *TOKENIZER.encode("4<eos>54<eos>")]
