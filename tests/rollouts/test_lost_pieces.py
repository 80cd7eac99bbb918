"""Tokens of a response that is sampled in pieces and cannot be completed are counted."""

import asyncio
import os
import random
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import (
    REPETITION_CHECK_TOKENS,
    EnvironmentSettings,
    RolloutSettings,
)
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode import Episode
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire.messages import GroupDone, GroupRequest
from tests.support.collectors import Outbox
from tests.support.fake_engine import Reply, configuration, fake_engine, routes, serving
from tests.support.scripted_model import EOS, PROMPT

PIECE = REPETITION_CHECK_TOKENS
LONGEST = 4 * PIECE
# Tokens without a repeated 40-gram
IDS = random.Random(0).choices(range(5, 45), k=PIECE)
SAMPLING = Sampling(max_new_tokens=LONGEST, temperature=1.0, stop_token_ids=(EOS,))


class FailingEngine:
    """Samples the first piece of a response, and fails at the next one.

    Somebody aborts a request for more than a piece.

    failure: refuse: it answers with status 400. spoil: it samples tokens without usable
    log-probabilities. hang: it does not answer.
    """

    def __init__(self, failure: str) -> None:
        self.num_sampled = 0
        self._failure = failure

    def __call__(self, n: int, body: Reply) -> Reply | int | None:
        is_first = len(body["input_ids"]) == len(PROMPT.token_ids)
        if not is_first and self._failure == "refuse":
            return 400
        if not is_first and self._failure == "hang":
            return None
        is_aborted = body["sampling_params"]["max_new_tokens"] > PIECE
        self.num_sampled += PIECE
        logprob = -0.5 if is_first else None
        return {
            "output_ids": IDS,
            "meta_info": {
                "finish_reason": {"type": "abort" if is_aborted else "length"},
                "weight_version": "3",
                "output_token_logprobs": [(logprob, token, None) for token in IDS],
                "routed_experts": routes(body, PIECE),
            },
        }


def collect(engine: FailingEngine, settings: RolloutSettings, environment: str) -> GroupDone:
    """Sample a group of two."""

    async def run() -> GroupDone:
        outbox = Outbox()
        async with fake_engine(engine, seconds=0.0) as url:
            base = configuration(environment=EnvironmentSettings(name=environment))
            collector = Collector(0, msgspec.structs.replace(base, rollout=settings), outbox.put)
            await collector.handle(serving(url, version=3))
            await collector.handle(
                GroupRequest(group_id="g", prompt=PROMPT, num_samples=2, sampling=SAMPLING)
            )
            while not isinstance(answer := await asyncio.wait_for(outbox.get(), 20), GroupDone):
                pass
            await collector.close()
            return answer

    return asyncio.run(run())


SETTINGS = {
    "aborted": RolloutSettings(max_new_tokens=LONGEST),
    "stop_repetition": RolloutSettings(max_new_tokens=LONGEST, stop_repetition=0.5),
}


@pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))
@pytest.mark.parametrize("failure", ["refuse", "spoil"])
def test_a_rejected_rollout_counts_the_pieces_of_its_response(
    settings: RolloutSettings, failure: str
) -> None:
    engine = FailingEngine(failure)
    answer = collect(engine, settings, "single_turn")
    assert not answer.group.rollouts
    assert engine.num_sampled >= 2 * PIECE
    assert answer.generated_tokens == engine.num_sampled
    reason = {"refuse": "engine", "spoil": "logprobs_nonfinite"}[failure]
    assert answer.group.rejected_tokens == {reason: engine.num_sampled}


class ImpatientEnvironment(Environment):
    """Gives a response up that takes long, and ends without it."""

    async def play(self, episode: Episode) -> None:
        await asyncio.wait_for(episode.respond(), 0.5)


class DyingEnvironment(Environment):
    """Ends its process in the middle of a response, and does nothing the next time."""

    async def play(self, episode: Episode) -> None:
        marker = Path(os.environ["MARKER"])
        if marker.exists():
            episode.demonstrate("5")
            return
        response = asyncio.ensure_future(episode.respond())
        await asyncio.sleep(0.7)
        marker.touch()
        assert not response.done()
        os._exit(3)


@pytest.mark.slow
@pytest.mark.nightly
def test_pieces_of_an_episode_whose_process_ends_are_counted_as_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two calls ends the process. Both begin again."""
    monkeypatch.setenv("MARKER", str(tmp_path / "ended"))
    engine = FailingEngine("hang")
    environment = f"{__name__}:DyingEnvironment"
    answer = collect(engine, SETTINGS["stop_repetition"], environment)
    assert engine.num_sampled == 2 * PIECE
    assert answer.generated_tokens == engine.num_sampled
    assert answer.group.rejected_tokens["environment_restarted"] == 2 * PIECE


@pytest.mark.slow
def test_a_response_that_its_environment_gives_up_counts() -> None:
    engine = FailingEngine("hang")
    environment = f"{__name__}:ImpatientEnvironment"
    answer = collect(engine, SETTINGS["stop_repetition"], environment)
    assert engine.num_sampled == 2 * PIECE
    assert answer.generated_tokens == engine.num_sampled
    assert answer.group.rejected_tokens == {"environment": engine.num_sampled}
