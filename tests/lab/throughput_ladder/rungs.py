"""The rungs of the ladder, and the time of a step on each of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_rl.config.schema import EngineSettings, RewardSettings
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import RewardRunner
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.user_process.messages import OpenClass
from megatron_rl.rollouts.user_process.remote_class import RemoteClass
from megatron_rl.rollouts.user_process.user_classes import ScorerInProcess
from megatron_rl.rollouts.wire.messages import FromCollector
from sglang_bridge.generation import Generation
from tests.lab.throughput_ladder.engines import Engines
from tests.lab.throughput_ladder.workload import Response

NUM_ENGINES = 2
SCORER = "tests.lab.throughput_ladder.scorer:Slow"


class Order(StrEnum):
    """The rule by which a response gets a slot first."""

    SUBMISSION = "submission"
    HISTORY = "history"  # the longest by the responses to its prompt in an earlier epoch
    TRUTH = "truth"  # the longest


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The parts that a step uses.

    narrow_routes: engines with the plugin. overlaps: each response is scored when it is there, not
    after the last one. paper_ratio: the speed-up over the baseline that the method's paper reports,
    of another program on GPUs.
    """

    name: str
    narrow_routes: bool
    overlaps: bool
    order: Order
    paper_ratio: float | None = None


BASELINE = Rung(name="baseline", narrow_routes=False, overlaps=False, order=Order.SUBMISSION)
RUNGS = (
    BASELINE,
    Rung(name="narrow routes", narrow_routes=True, overlaps=False, order=Order.SUBMISSION),
    Rung(
        name="overlapped rewards",
        narrow_routes=True,
        overlaps=True,
        order=Order.SUBMISSION,
        paper_ratio=1.17,
    ),
    Rung(
        name="longest first, by history",
        narrow_routes=True,
        overlaps=True,
        order=Order.HISTORY,
        paper_ratio=1.66,
    ),
    Rung(name="longest first, by truth", narrow_routes=True, overlaps=True, order=Order.TRUTH),
)


@dataclass(frozen=True)
class StepResult:
    """seconds: from the first request to the last verdict. digest: of everything sampled.

    exposed_seconds: from the last response to the last verdict. last_scored: the name of the
    response whose verdict came last.
    """

    seconds: float
    digest: str
    exposed_seconds: float = 0.0
    last_scored: str = ""


async def run_step(
    rung: Rung,
    engines: Engines,
    responses: Sequence[Response],
    form: RequestForm,
    rewards: RewardRunner,
    max_running: int,
) -> StepResult:
    """Sample and score the responses of a step. max_running: responses that an engine runs."""
    settings = EngineSettings(max_running_requests=max_running)
    with ThreadPoolExecutor(2) as threads:
        pool = EnginePool(settings, form, _ignore, threads=threads)
        await pool.set_engines(engines.narrow if rung.narrow_routes else engines.wide)
        try:
            return await _run(rung, pool, rewards, responses)
        finally:
            await pool.close()


async def _run(
    rung: Rung, pool: EnginePool, rewards: RewardRunner, responses: Sequence[Response]
) -> StepResult:
    last_response = 0.0
    last_scored = ""

    async def score(response: Response) -> None:
        nonlocal last_scored
        verdict = await rewards.score(
            prompt_of(response), "", FinishReason.STOP, subject=response.name
        )
        assert verdict.reward == 1.0, verdict.reason
        last_scored = response.name

    async def sample(response: Response) -> Generation:
        nonlocal last_response
        generation = await pool.generate(
            response.token_ids,
            Sampling(max_new_tokens=response.length, temperature=1.0),
            rid=response.name,
            return_routes=True,
            rejected_tokens=Counter(),
            seed=response.seed,
            priority=(1, -expected_tokens(rung.order, response)),
        )
        assert len(generation.output_ids) == response.length
        last_response = time.monotonic()
        if rung.overlaps:
            await score(response)
        return generation

    start = time.monotonic()
    generations = await asyncio.gather(*map(sample, responses))
    if not rung.overlaps:
        await asyncio.gather(*map(score, responses))
    end = time.monotonic()
    digest = hashlib.sha256()
    for generation in generations:
        assert generation.routes is not None
        for array in (generation.output_ids, generation.logprobs, generation.routes):
            digest.update(array.tobytes())
    return StepResult(end - start, digest.hexdigest(), end - last_response, last_scored)


def prompt_of(response: Response) -> Prompt:
    """Return the prompt that the scorer of a response gets."""
    return Prompt(id=response.name, token_ids=tuple(response.token_ids), answer="", task="ladder")


def expected_tokens(order: Order, response: Response) -> int:
    """Return what a step expects of a response, by which it is put in order."""
    tokens = {Order.SUBMISSION: 0, Order.HISTORY: response.history, Order.TRUTH: response.length}
    return tokens[order]


async def _ignore(message: FromCollector) -> None:
    raise AssertionError(f"an engine fails in a measurement: {message}")


@contextlib.asynccontextmanager
async def slow_scorer(processes: int, options: Mapping[str, Any]) -> AsyncIterator[RewardRunner]:
    """Open a scorer that takes time for each response. options: of its class."""
    settings = RewardSettings(name=SCORER, options=dict(options))
    opening = OpenClass(search_path=tuple(sys.path), reward=settings, grace_s=5.0)
    remote_classes = [RemoteClass(SCORER, opening, open_timeout_s=60.0) for _ in range(processes)]
    try:
        for remote_class in remote_classes:
            remote_class.wait_until_open()
        yield RewardRunner(ScorerInProcess(*remote_classes))
    finally:
        for remote_class in remote_classes:
            await remote_class.close()
