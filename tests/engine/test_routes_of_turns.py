"""Routes of rollouts with several turns, from a real engine.

Each turn is a request of its own, which reads cached tokens of the turns before it. The routes of
all turns together must equal the routes of the whole text: in one request to an engine without a
cache, and in the trainer's own forward pass.

`pytest -s tests/engine/test_routes_of_turns.py` prints the rows that differ.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatron_rl.config.schema import (
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import Role, Rollout
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.planning.rank_view import RankView
from megatron_rl.prompts import column_addition
from megatron_rl.rollouts.collector.episode_runner import EpisodeRunner
from megatron_rl.rollouts.collector.progress import ScoredRollout
from megatron_rl.rollouts.wire.messages import Configure, FromCollector, GroupRequest
from megatron_rl.training.micro_batches import Batcher
from sglang_bridge.client import GenerateClient
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.mcore.replayed_models import build
from tests.support.engines import flush_idle_cache, running_engine
from tests.support.exactness import EXACT
from tests.support.policies import COLUMN_ADDITION as CHECKPOINT

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(400)]

SHAPE = read_shape(CHECKPOINT)
TOKENIZER = Tokenizer.from_directory(CHECKPOINT)
# After an incorrect answer, the model reads a call with its result, and answers again
ENVIRONMENT = EnvironmentSettings(
    name="tests.plugins.examples.my_environment:SecondTry", options={"hint": "b1+3+1=05"}
)
NUM_PROMPTS = 40
# The largest share of rows with other routes. bfloat16 rounds in other kernels on each side, so
# experts with nearly equal scores change places.
LIMITS = {"float32": 0.0 if EXACT else 0.01, "bfloat16": 0.03}


@dataclass(frozen=True)
class Sampled:
    """Rollouts of an engine, and the routes that it records for each of their texts alone."""

    dtype: str
    rollouts: tuple[Rollout, ...]
    routes_of_texts: tuple[npt.NDArray[np.int32], ...]


def prompts() -> list[Prompt]:
    return [
        Prompt(id=q.id, token_ids=TOKENIZER.encode(q.text), answer=q.answer, task=q.task)
        for q in islice(column_addition.questions(0), NUM_PROMPTS)
    ]


def configuration(engine: ManagedEngine) -> Configure:
    return Configure(
        api_key=engine.keys.api_key,
        model_path=str(CHECKPOINT),
        routes=SHAPE.route_shape,
        engine=EngineSettings(max_running_requests=16),
        rollout=RolloutSettings(max_new_tokens=96),
        reward=RewardSettings(),
        environment=ENVIRONMENT,
        vocab_size=SHAPE.vocab_size,
    )


async def sample_episodes(engine: ManagedEngine) -> list[Rollout]:
    """Play all episodes at the same time, so that their turns share the engine's batches."""

    async def ignore(message: FromCollector) -> None:
        pass

    sampling = Sampling(
        max_new_tokens=96, temperature=1.0, stop_token_ids=tuple(SHAPE.eos_token_ids)
    )
    with ThreadPoolExecutor(1) as threads:
        runner = EpisodeRunner(configuration(engine), ignore, threads)
        await runner.engines.set_engines([engine.engine])
        requests = [
            GroupRequest(group_id=f"g{i}", prompt=prompt, num_samples=1, sampling=sampling)
            for i, prompt in enumerate(prompts())
        ]
        for request in requests:
            runner.announce(request)
        results = await asyncio.gather(*(runner.run(request, 0) for request in requests))
        await runner.close()
    return [result.rollout for result in results if isinstance(result, ScoredRollout)]


async def routes_of_text(engine: ManagedEngine, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Let the engine read a whole text in one request, with an empty cache."""
    await asyncio.to_thread(flush_idle_cache, engine.admin())
    shape = (SHAPE.num_layers, SHAPE.topk)
    client = GenerateClient(engine.url, api_key=engine.keys.api_key, route_shape=shape)
    async with client:
        generation = await client.generate(
            tokens, Sampling(max_new_tokens=1, temperature=1.0), rid="whole", return_routes=True
        )
    assert generation.cached_tokens == 0
    assert generation.routes is not None and len(generation.routes) == len(tokens)
    return np.asarray(generation.routes)


def tokens_of(rollout: Rollout) -> list[int]:
    return [int(token) for segment in rollout.segments for token in segment.tokens]


@pytest.fixture(scope="module", params=list(LIMITS))
def sample(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sampled]:
    directory = tmp_path_factory.mktemp("engine")
    with running_engine(CHECKPOINT, directory, dtype=request.param) as engine:
        rollouts = asyncio.run(sample_episodes(engine))
        two_turns = tuple(r for r in rollouts if any(s.role is Role.TOOL for s in r.segments))
        assert len(two_turns) >= NUM_PROMPTS // 4
        routes = tuple(
            asyncio.run(routes_of_text(engine, tokens_of(rollout)[:-1])) for rollout in two_turns
        )
    yield Sampled(request.param, two_turns, routes)


def differs(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return where two sets of experts differ, [tokens, layers]. Their order has no meaning."""
    result: npt.NDArray[np.bool_] = (np.sort(left, -1) != np.sort(right, -1)).any(-1)
    return result


def test_the_routes_of_all_turns_are_those_of_one_request_for_the_whole_text(
    sample: Sampled,
) -> None:
    """Counted for each kind of segment, so that few tool rows cannot hide among many others."""
    counts = {role: [0, 0] for role in Role}
    for rollout, routes in zip(sample.rollouts, sample.routes_of_texts, strict=True):
        assert rollout.routes is not None and len(rollout.routes) == len(routes)
        for segment in rollout.segments:
            rows = slice(*segment.route_rows)
            differences = differs(rollout.routes[rows], routes[rows])
            counts[segment.role][0] += int(differences.sum())
            counts[segment.role][1] += differences.size
    for role, (differing, total) in counts.items():
        print(f"{sample.dtype}: {differing} of {total} {role.value} rows differ from one request")
        assert total > 300
        assert differing <= LIMITS[sample.dtype] * total


def measure(sample: Sampled, rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Return the rows whose routes are not the trainer's own choice, and all rows."""
    from megatron_rl.mcore.schedule import run_schedule

    models, replay = build(CHECKPOINT, dtype=sample.dtype)
    layers = tuple(range(SHAPE.num_layers))
    batcher = Batcher(RankView(layers=(layers,)), SHAPE.route_shape, torch.device("cpu"))
    batch = batcher.pack(rollouts, [1.0] * len(rollouts)).inputs

    def ignore(logits: torch.Tensor, index: int) -> tuple[None, None]:
        return None, None

    run_schedule(models, [batch], ignore, forward_only=True, replay=replay, measure_routes=True)
    differing, rows = replay.disagreement()
    return differing, rows


def test_the_routes_of_all_turns_are_those_of_the_trainers_own_forward_pass(
    megatron: Any, sample: Sampled
) -> None:
    differing, rows = measure(sample, sample.rollouts)
    print(f"{sample.dtype}: {differing} of {rows} rows differ from the trainer's choice")
    num_inputs = sum(len(tokens_of(rollout)) - 1 for rollout in sample.rollouts)
    assert rows == num_inputs * SHAPE.num_layers
    assert differing <= LIMITS[sample.dtype] * rows


def test_rows_of_a_result_that_are_one_place_away_are_found(megatron: Any, sample: Sampled) -> None:
    def shift(rollout: Rollout) -> Rollout:
        assert rollout.routes is not None
        (tool,) = (s for s in rollout.segments if s.role is Role.TOOL)
        routes = rollout.routes.copy()
        rows = slice(*tool.route_rows)
        routes[rows] = np.roll(routes[rows], 1, axis=0)
        return replace(rollout, routes=routes)

    differing, _ = measure(sample, [shift(rollout) for rollout in sample.rollouts])
    tool_rows = sum(
        len(segment.tokens)
        for rollout in sample.rollouts
        for segment in rollout.segments
        if segment.role is Role.TOOL
    )
    assert differing > 0.5 * tool_rows * SHAPE.num_layers
