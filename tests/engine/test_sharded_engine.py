"""Engines of two ranks on CPUs: weights arrive, and audits compare every rank's shards by value."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys, create_keys, write_server_config
from sglang_bridge.server.command import build_argv, build_environment
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.server.ports import choose_port
from sglang_bridge.server.readiness import require_external_engines
from sglang_bridge.settings import ServerPlace, ServerSettings
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import RankPlace, rank_places
from tests.sglang_bridge.tiny_model import EXPERTS, LAYERS, write_tiny_model
from tests.support.engines import running_engine
from tests.support.updaters import SoleUpdater, in_units

pytestmark = pytest.mark.engine

Weights = dict[str, torch.Tensor]
KEY_VALUE_HEADS = 2
# dtype and ep. SGLang's experts for CPUs cannot compute with ep=2, but load their weights.
DAILY = ("bfloat16", 1)
NIGHTLY = [("float32", 1), ("float32", 2), ("bfloat16", 2)]
SHAPES = [DAILY, *(pytest.param(shape, marks=pytest.mark.nightly) for shape in NIGHTLY)]
NUM_PARAMETERS = 3 + 9 * LAYERS


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedEngine]:
    dtype, ep = request.param
    model = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0)
    logs = tmp_path_factory.mktemp("logs")
    with running_engine(
        model,
        logs,
        max_running_requests=8,
        dtype=dtype,
        tp=2,
        ep=ep,
        extra_args=["--skip-server-warmup"],
    ) as running:
        yield running


@pytest.fixture(scope="module")
def dtype(engine: ManagedEngine) -> torch.dtype:
    name = engine.admin().server_info()["dtype"]
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@pytest.fixture(scope="module")
def weights(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Other weights than those with which the engine starts."""
    model = write_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    content = in_units(load_file(model / "model.safetensors"))
    return {name: tensor.to(dtype) for name, tensor in content.items()}


def expectation_of(weights: Weights, engine: Engine, dtype: torch.dtype) -> WeightExpectation:
    expectation = WeightExpectation(
        dtype=dtype,
        num_experts=EXPERTS,
        places=rank_places(engine),
        num_key_value_heads=KEY_VALUE_HEADS,
    )
    for name, tensor in weights.items():
        expectation.add(name, tensor)
    return expectation


def send(weights: Weights, admin: AdminClient, version: int) -> None:
    transport = DistributedTransport(backend="gloo", timeout_seconds=60)
    updater = SoleUpdater(transport, bucket_bytes=256 * 1024)
    updater.push(iter(weights.items()), version, admins=[admin])
    updater.close()


def test_every_rank_holds_its_shards_of_the_weights_that_were_sent(
    engine: ManagedEngine, weights: Weights, dtype: torch.dtype
) -> None:
    send(weights, engine.admin(), version=7)
    report = audit_engine(engine.admin(), expectation_of(weights, engine.engine, dtype))
    assert report.num_compared == NUM_PARAMETERS
    report.raise_on_mismatch(7)
    # One value of the last expert, which only the last rank holds if experts are divided
    name = f"model.layers.1.mlp.experts.{EXPERTS - 1}.down_proj.weight"
    other = weights[name].clone()
    other[-1, -1] += 1
    changed_weights = weights | {name: other}
    report = audit_engine(engine.admin(), expectation_of(changed_weights, engine.engine, dtype))
    (mismatch,) = report.mismatches
    assert mismatch.parameter == "model.layers.1.mlp.experts.w2_weight"
    assert name in mismatch.tensors
    assert "held by rank 1 " in mismatch.reason


def test_another_division_of_experts_is_another_checksum(
    engine: ManagedEngine, weights: Weights, dtype: torch.dtype
) -> None:
    first = expectation_of(weights, Engine(url="x", tp=2, ep=1), dtype)
    second = expectation_of(weights, Engine(url="x", tp=2, ep=2), dtype)
    name = "model.layers.0.mlp.experts.w13_weight"
    assert first.checksums(RankPlace(0, 2, 1))[name] != second.checksums(RankPlace(0, 2, 2))[name]


def test_an_external_engine_has_the_sizes_that_it_reports(
    engine: ManagedEngine, dtype: torch.dtype
) -> None:
    info = engine.admin().server_info()
    settings = ServerSettings(dtype=info["dtype"], start_timeout_s=5.0)
    (checked_engine,) = require_external_engines(
        [Engine(url=engine.url)], engine.keys, settings, return_routes=True
    )
    assert (checked_engine.tp, checked_engine.ep) == (2, engine.engine.ep)


@contextlib.contextmanager
def engine_of_two_nodes(model: Path, directory: Path, keys: RunKeys) -> Iterator[str]:
    """Yield the URL of two servers of one engine, as users start them on two nodes."""
    config = directory / "keys.yaml"
    write_server_config(keys, config)
    settings = ServerSettings(tp=2, max_running_requests=8)
    meeting = f"127.0.0.1:{choose_port('127.0.0.1')}"
    port = choose_port("127.0.0.1")
    with contextlib.ExitStack() as stack:
        for node in range(2):
            place = ServerPlace(
                model_path=str(model), device="cpu", num_servers=2, server_rank=node
            )
            argv = build_argv(
                settings, place, port=port + 100 * node, key_config=config, meeting=meeting
            )
            log = stack.enter_context((directory / f"node{node}.log").open("wb"))
            server = subprocess.Popen(
                argv,
                env=build_environment(settings, place, os.environ),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(server.wait)
            stack.callback(os.killpg, server.pid, signal.SIGKILL)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_engine_over_two_nodes_gets_every_shard(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=0)
    other = write_tiny_model(tmp_path / "other", seed=1)
    content = in_units(load_file(other / "model.safetensors"))
    keys = create_keys()
    # A sixth of it until something listens
    settings = ServerSettings(tp=2, start_timeout_s=1200.0)
    with engine_of_two_nodes(model, tmp_path, keys) as url:
        external = [Engine(url=url, tp=2)]
        (checked_engine,) = require_external_engines(external, keys, settings, return_routes=True)
        admin = AdminClient(checked_engine, keys)
        send(content, admin, version=9)
        report = audit_engine(admin, expectation_of(content, checked_engine, torch.float32))
        assert report.num_compared == NUM_PARAMETERS
        report.raise_on_mismatch(9)
