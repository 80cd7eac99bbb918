"""Real engines and real rollouts for tests."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.single_turn import SingleTurn
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.run.engines import route_shape
from sglang_bridge.client import GenerateClient
from sglang_bridge.generation import Generation
from sglang_bridge.keys import create_keys
from sglang_bridge.lifeline import Lifeline
from sglang_bridge.server import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings


@contextlib.contextmanager
def running_engine(model_path: Path, directory: Path, *, max_running_requests: int = 128) -> Iterator[ManagedEngine]:
    """A float32 engine on CPU, healthy, ended afterwards."""
    lifeline = Lifeline()
    settings = ServerSettings(max_running_requests=max_running_requests, extra_args=["--weight-version=0"])
    place = ServerPlace(model_path=str(model_path), device="cpu")
    engine = ManagedEngine.start(
        settings, place, keys=create_keys(), log_path=directory / "engine.log", lifeline=lifeline
    )
    try:
        engine.wait_healthy(240)
        yield engine
    finally:
        engine.stop()
        lifeline.close()


def sample(
    engine: ManagedEngine, shape: ModelShape, model_path: Path, prompts: Sequence[Prompt], sampling: Sampling
) -> list[Rollout]:
    """One response to each prompt, as the collector would get it."""
    tokenizer = Tokenizer.from_directory(model_path)

    rules = EpisodeRules(sampling=sampling, routes=route_shape(shape), train_truncated=True)
    numbers = itertools.count()

    async def draw() -> list[Rollout]:
        async with GenerateClient(
            engine.url, api_key=engine.keys.api_key, route_shape=(shape.num_layers, shape.topk)
        ) as client:

            def generate(tokens: Sequence[int], sampling: Sampling) -> Awaitable[Generation]:
                return client.generate(tokens, sampling, rid=f"t-{next(numbers)}")

            async def play(index: int, prompt: Prompt) -> Rollout:
                episode = Episode(prompt, generate, tokenizer, rules, rollout_id=f"t-{index}")
                await SingleTurn().play(episode)
                return episode.rollout()

            return list(await asyncio.gather(*(play(i, p) for i, p in enumerate(prompts))))

    return asyncio.run(draw())
