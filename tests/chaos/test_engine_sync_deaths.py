"""Trainers and real engines that die at each phase of a weight update.

Two ranks own the weights of two engines. Both engines are asked for a token all the time, and its
log-probability tells which weights have computed it: nothing else than a whole version is served.

`pytest -rP tests/chaos/test_engine_sync_deaths.py` prints the seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import psutil
import pytest
import torch

from sglang_bridge.client import GenerateClient
from sglang_bridge.errors import EngineError
from sglang_bridge.generation import GenerationRejected
from sglang_bridge.keys import create_keys
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.expectation import WeightExpectation
from tests.chaos.sync_rank import (
    PHASES,
    PHASES_OF_ALL,
    version_of_death,
    weights_of,
)
from tests.sglang_bridge.tiny_model import EXPERTS, write_tiny_model
from tests.support.engines import running_engine
from tests.support.exactness import EXACT
from tests.support.jobs import command_line
from tests.support.sync_ranks import Ranks

pytestmark = [pytest.mark.nightly, pytest.mark.chaos, pytest.mark.engine, pytest.mark.timeout(900)]

SERVES_WITHIN_SECONDS = 20.0
START_SECONDS = 240.0
# One token, so that no answer has tokens of two versions
SAMPLING = SimpleNamespace(max_new_tokens=1, temperature=1.0, stop_token_ids=(), top_p=1.0)
PAUSE_SECONDS = 0.1
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
VERSIONS = (1, 2, 3)
BOTH = 2

CASES = [(dtype, phase) for dtype in DTYPES for phase in PHASES]
CASES_OF_RANK_1 = [(dtype, phase) for dtype in DTYPES for phase in PHASES_OF_ALL]


class Answer(NamedTuple):
    """A token that an engine served.

    time: of its arrival. values: the token and its log-probability.
    """

    time: float
    versions: tuple[str, ...]
    values: tuple[int, float]


class Asker:
    """Asks an engine for a token all the time, until it ends or the context does."""

    def __init__(self, engine: ManagedEngine) -> None:
        self.answers: list[Answer] = []
        self._url = engine.url
        self._key = engine.keys.api_key
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the engine does not answer"

    def first_time_of(self, version: int, *, after: float = 0.0, seconds: float = 60.0) -> float:
        """Wait for an answer of a version, and return when it came."""
        deadline = time.monotonic() + seconds
        while True:
            for answer in list(self.answers):
                if answer.versions == (str(version),) and answer.time > after:
                    return answer.time
            assert time.monotonic() < deadline, f"{self._url} does not serve version {version}"
            time.sleep(0.02)

    async def _ask(self) -> None:
        async with GenerateClient(self._url, api_key=self._key) as client:
            while not self._end.is_set():
                try:
                    answer = await ask(client)
                except (EngineError, GenerationRejected):
                    return  # the engine ends
                self.answers.append(answer)
                await asyncio.sleep(PAUSE_SECONDS)


async def ask(client: GenerateClient) -> Answer:
    reply = await client.generate([5, 6, 7], SAMPLING, rid="one", return_routes=False, seed=5)
    values = (int(reply.output_ids[0]), float(reply.logprobs[0]))
    return Answer(time.time(), reply.weight_versions, values)


async def ask_once(engine: ManagedEngine) -> Answer:
    async with GenerateClient(engine.url, api_key=engine.keys.api_key) as client:
        return await ask(client)


class Pair:
    """Two engines, and what each version of the weights answers.

    values_of: by version, the values of an answer.
    """

    def __init__(self, engines: list[ManagedEngine], model: Path, dtype: str) -> None:
        self.engines = engines
        self.dtype = dtype
        self._file = model / "model.safetensors"
        self.values_of: dict[str, tuple[int, float]] = {}

    def learn(self, folder: Path) -> None:
        """Send each version in an undisturbed update, audit it, and note what it answers."""
        for version in VERSIONS:
            ranks = self.start_ranks(folder, versions=[version])
            ranks.wait()
            assert "DONE" in ranks.lines and ranks.failures == []
            self.audit(version)
            first, second = (asyncio.run(ask_once(engine)) for engine in self.engines)
            assert self.are_equal(first.values, second.values)
            self.values_of[str(version)] = first.values
        assert len({*self.values_of.values()}) == len(VERSIONS)

    def start_ranks(self, folder: Path, **job: Any) -> Ranks:
        return Ranks(
            folder,
            urls=[engine.url for engine in self.engines],
            keys=self.engines[0].keys,
            weights=str(self._file),
            dtype=self.dtype,
            **job,
        )

    def audit(self, version: int) -> None:
        """Compare every value that the engines hold."""
        expectation = WeightExpectation(dtype=getattr(torch, self.dtype), num_experts=EXPERTS)
        for name, tensor in weights_of(self._file, version, self.dtype).items():
            expectation.add(name, tensor)
        for engine in self.engines:
            report = audit_engine(engine.admin(), expectation)
            assert report.num_compared > 0
            report.raise_on_mismatch(version)

    def require_nothing_mixed(self, answers: list[Answer]) -> None:
        """Require that each answer comes from one whole version."""
        for answer in answers:
            (version,) = answer.versions
            assert self.are_equal(answer.values, self.values_of[version]), answer

    def are_equal(self, values: tuple[int, float], others: tuple[int, float]) -> bool:
        """Compare answers. MKL's sums depend on the batch on a processor without AVX-512."""
        tolerance = {"float32": 1e-4, "bfloat16": 2e-2}[self.dtype]
        return values[0] == others[0] and math.isclose(
            values[1], others[1], rel_tol=0.0, abs_tol=0.0 if EXACT else tolerance
        )

    def start_again(self, engine: ManagedEngine) -> None:
        """Replace an engine, as its node does."""
        engine.restart(timeout=15)
        engine.wait_healthy(START_SECONDS)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give two engines of a type. They start with the first test of it."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    pairs: dict[str, Pair] = {}
    with contextlib.ExitStack() as stack:

        def pair_of(dtype: Dtype) -> Pair:
            if dtype not in pairs:
                keys = create_keys()
                open_engine = partial(running_engine, model, dtype=dtype, keys=keys)
                contexts = [open_engine(tmp_path_factory.mktemp("logs")) for _ in range(BOTH)]
                with ThreadPoolExecutor() as pool:
                    engines = list(pool.map(stack.enter_context, contexts))
                pairs[dtype] = Pair(engines, model, dtype)
                pairs[dtype].learn(tmp_path_factory.mktemp("jobs"))
            return pairs[dtype]

        yield pair_of


def scheduler_of(engine: ManagedEngine) -> int:
    """The process that holds the weights of an engine."""
    family = psutil.Process(engine.pid).children(recursive=True)
    (process,) = [process for process in family if "sglang::scheduler" in command_line(process)]
    return process.pid


def kill_trainer(pair: Pair, folder: Path, phase: str, rank: int) -> None:
    """Kill a rank, and let the next run use both engines."""
    first, second = pair.engines
    with Asker(first) as asker, Asker(second) as other:
        version = version_of_death(phase)
        ranks = pair.start_ranks(folder, versions=[1, 2], rank=rank, version=version, phase=phase)
        ranks.wait()
        death = ranks.time_of("DEATH")
        assert "DONE" not in ranks.lines
        next_run = pair.start_ranks(folder, versions=[3])
        next_run.wait()
        assert "DONE" in next_run.lines and next_run.failures == []
        start = next_run.time_of("READY")
        times = [each.first_time_of(3, after=start) for each in (asker, other)]
    pair.audit(3)
    for each in (asker, other):
        pair.require_nothing_mixed(each.answers)
        served_versions = {answer.versions[0] for answer in each.answers if answer.time > death}
        assert "2" not in served_versions or phase == "audit"
    seconds = max(times) - start
    print(f"| {pair.dtype} | rank {rank} | {phase} | {seconds:.1f} s |")
    assert seconds < SERVES_WITHIN_SECONDS


@pytest.mark.parametrize(("dtype", "phase"), CASES)
def test_the_next_run_uses_engines_of_a_trainer_that_died(
    tmp_path: Path, pair_of: Any, dtype: str, phase: str
) -> None:
    kill_trainer(pair_of(dtype), tmp_path, phase, rank=0)


@pytest.mark.parametrize(("dtype", "phase"), CASES_OF_RANK_1)
def test_the_next_run_uses_engines_of_a_trainer_whose_other_rank_died(
    tmp_path: Path, pair_of: Any, dtype: str, phase: str
) -> None:
    kill_trainer(pair_of(dtype), tmp_path, phase, rank=1)


@pytest.mark.parametrize(("dtype", "phase"), CASES)
def test_the_other_engine_serves_when_one_has_died(
    tmp_path: Path, pair_of: Any, dtype: str, phase: str
) -> None:
    """SGLang gives its groups no timeout. It notices that a connection is closed."""
    pair = pair_of(dtype)
    victim, survivor = pair.engines
    try:
        answers = kill_engine(pair, tmp_path, phase)
    finally:
        pair.start_again(victim)
    with Asker(survivor) as asker:
        next_run = pair.start_ranks(tmp_path, versions=[3])
        next_run.wait()
        assert "DONE" in next_run.lines and next_run.failures == []
        asker.first_time_of(3, after=next_run.time_of("READY"))
    pair.audit(3)
    pair.require_nothing_mixed(answers + asker.answers)
    pair.require_nothing_mixed([asyncio.run(ask_once(victim))])


def kill_engine(pair: Pair, folder: Path, phase: str) -> list[Answer]:
    """Kill the first engine, and let the second one serve. Returns what both have answered."""
    victim, survivor = pair.engines
    version = version_of_death(phase)
    death = {"rank": 0, "version": version, "phase": phase, "pid": scheduler_of(victim)}
    with Asker(survivor) as asker, Asker(victim) as other:
        ranks = pair.start_ranks(folder, versions=[1, 2], **death)
        ranks.wait()
        assert "DONE" in ranks.lines
        # From the flush on, the update of the engine is complete
        assert len(ranks.failures) == 1 or phase in ("flush", "audit")
        assert all(victim.url in line and survivor.url not in line for line in ranks.failures)
        seconds = asker.first_time_of(version) - ranks.time_of("DEATH")
        asker.first_time_of(2)
    # In the last phase, it serves before the other one dies
    print(f"| {pair.dtype} | engine | {phase} | {max(seconds, 0.0):.1f} s |")
    assert seconds < SERVES_WITHIN_SECONDS
    return asker.answers + other.answers
