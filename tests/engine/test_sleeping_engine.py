"""A real engine on a CPU sleeps and wakes by tags, while a request waits for it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.client import GenerateClient
from sglang_bridge.engine import Engine
from sglang_bridge.generation import Generation
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.crew import Alone
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.source import SoleSource
from sglang_bridge.weights.updater import WeightUpdater
from tests.engine.test_bridge_engine import client_of, sampling
from tests.sglang_bridge.tiny_model import EXPERTS, write_tiny_model
from tests.support.engines import running_engine
from tests.support.jobs import start_job
from tests.support.updaters import in_units

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

TOKENS = 400
# Most of them wait, so that some are left whenever the engine sleeps
NUM_REQUESTS = 24


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[request.param]


@pytest.fixture(scope="module")
def engine(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedEngine]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0)
    logs = tmp_path_factory.mktemp("logs")
    name = "bfloat16" if dtype is torch.bfloat16 else "float32"
    with running_engine(model, logs, max_running_requests=4, dtype=name) as running:
        yield running


@pytest.fixture(scope="module")
def weights(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """Other weights than those with which the engine starts."""
    model = write_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    content = in_units(load_file(model / "model.safetensors"))
    return {name: tensor.to(dtype) for name, tensor in content.items()}


@pytest.fixture
def updater() -> Iterator[WeightUpdater]:
    transport = DistributedTransport(backend="gloo", timeout_seconds=60)

    def open_admin(engine: Engine) -> AdminClient:
        raise AssertionError("the only rank has clients already")

    part = RankPart(transport, Alone(), bucket_bytes=2**18, open_admin=open_admin)
    updater = WeightUpdater(part)
    yield updater
    updater.close()


def test_a_request_outlives_the_sleep_of_its_engine_and_ends_with_other_weights(
    engine: ManagedEngine,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    updater: WeightUpdater,
) -> None:
    admin = engine.admin()

    async def run() -> list[Generation]:
        async with client_of(engine) as client:
            requests = asyncio.gather(*(generate(client, index) for index in range(NUM_REQUESTS)))
            while not await asyncio.to_thread(is_running, engine):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(updater.sleep, [admin])
            assert not requests.done()
            source = SoleSource(lambda: iter(weights.items()))
            await asyncio.to_thread(updater.push, source, 1, [admin])
            return list(await requests)

    generations = asyncio.run(run())
    assert ["0", "1"] in [list(g.weight_versions) for g in generations]
    assert all(g.output_ids[-1] == 2 or len(g.output_ids) == TOKENS for g in generations)
    expectation = WeightExpectation(dtype=dtype, num_experts=EXPERTS)
    for name, tensor in weights.items():
        expectation.add(name, tensor)
    report = audit_engine(admin, expectation)
    report.raise_on_mismatch(1)
    assert report.num_compared > 0


async def generate(client: GenerateClient, index: int) -> Generation:
    return await client.generate([5, 6, 7 + index % 4], sampling(TOKENS), rid=f"long-{index}")


def is_running(engine: ManagedEngine) -> bool:
    """True once the engine has sampled a part of a response."""
    states = engine.admin().server_info()["internal_states"]
    return any(state.get("last_gen_throughput", 0) for state in states)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_colocated_engines_trains(tmp_path: Path, dtype: str) -> None:
    settings = (
        f"model.dtype={dtype}",
        "engine.colocated=true",
        "train.total_steps=3",
        "eval.every=1",
        "engine.count=2",
        "sync.audit_every=1",
    )
    job = start_job(tmp_path, *settings)
    output, _ = job.communicate(timeout=500)
    assert job.returncode == 0, output[-4000:]
    lines = (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["sync/version"] for record in records] == [0.0, 1.0, 2.0, 3.0]
    assert all(record["time/sleep"] > 0 for record in records[1:])
    assert all(record["sync/audit_mismatches"] == 0 for record in records)
    assert all(record["sync/engines"] == 2 for record in records)
