"""Real engines that never start, lose their port, die during an update, or lose their trainer."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sglang_bridge.client import GenerateClient
from sglang_bridge.errors import EngineDied, EngineError, WeightUpdateFailed
from sglang_bridge.keys import create_keys
from sglang_bridge.server import managed_engine as server
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.server.process_table import descendants, is_alive, kill, process_tree
from sglang_bridge.settings import ServerPlace, ServerSettings
from sglang_bridge.weights.distributed import DistributedTransport
from tests.sglang_bridge.tiny_model import write_tiny_model
from tests.support.updaters import SoleUpdater, in_units

pytestmark = pytest.mark.engine

# A trainer that starts an engine and waits.
TRAINER = """
import sys, time
from pathlib import Path
from sglang_bridge.keys import create_keys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings
lifeline = Lifeline()
settings = ServerSettings(max_running_requests=8, max_total_tokens=1024)
place = ServerPlace(model_path=sys.argv[1], device="cpu")
engine = ManagedEngine.start(
    settings, place, keys=create_keys(), log_path=Path(sys.argv[2]), lifeline=lifeline
)
engine.wait_healthy(240)
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., ManagedEngine]]:
    """Start engines that end with the test."""
    lifeline = Lifeline()
    running = []

    def start_one(model_path: Path = model) -> ManagedEngine:
        settings = ServerSettings(max_running_requests=8, max_total_tokens=1024)
        place = ServerPlace(model_path=str(model_path), device="cpu")
        log_path = tmp_path / f"engine-{len(running)}.log"
        running.append(
            ManagedEngine.start(
                settings, place, keys=create_keys(), log_path=log_path, lifeline=lifeline
            )
        )
        return running[-1]

    yield start_one
    for engine in running:
        engine.stop()
    lifeline.close()


def wait_until_dead(engine: ManagedEngine) -> EngineDied:
    with pytest.raises(EngineDied) as error_info:
        for _ in range(200):
            engine.check_alive()
            time.sleep(0.1)
    return error_info.value


@pytest.mark.nightly
def test_engine_without_a_model_reports_the_reason(
    start: Callable[..., ManagedEngine], tmp_path: Path
) -> None:
    engine = start(tmp_path / "nothing")
    with pytest.raises(EngineDied) as error_info:
        engine.wait_healthy(120)
    assert error_info.value.returncode != 0
    assert "nothing" in error_info.value.log_tail


def test_engine_that_is_not_healthy_in_time_raises(
    start: Callable[..., ManagedEngine],
) -> None:
    engine = start()
    while not descendants(engine.pid):
        engine.check_alive()
        time.sleep(0.05)
    with pytest.raises(EngineError, match=r"engine\.start_timeout_s"):
        engine.wait_healthy(2)
    tree = [engine.pid, *descendants(engine.pid)]
    assert len(tree) >= 2
    engine.stop()
    assert not any(map(is_alive, tree))


@pytest.mark.nightly
def test_port_taken_before_the_start_is_replaced(
    start: Callable[..., ManagedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        choose = server.choose_port
        answers = iter([listener.getsockname()[1]])  # as if it had been free before
        monkeypatch.setattr(
            server, "choose_port", lambda host, port: next(answers, None) or choose(host, port)
        )
        engine = start()
        initial_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert engine.url == initial_url
        engine.wait_healthy(240)
        assert engine.url != initial_url


def open_updater() -> SoleUpdater:
    transport = DistributedTransport(backend="gloo", timeout_seconds=20)
    return SoleUpdater(transport, bucket_bytes=256 * 1024)


@pytest.mark.nightly
def test_engine_death_during_an_update_spares_the_others(
    start: Callable[..., ManagedEngine], model: Path
) -> None:
    victim = start()
    survivor = start()
    for engine in (victim, survivor):
        engine.wait_healthy(240)
    updater = open_updater()
    admins = [victim.admin(), survivor.admin()]
    weights = in_units(load_file(model / "model.safetensors"))
    updater.push(iter(weights.items()), 1, admins)
    names: list[str] = []

    def export_while_one_dies() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(weights.items()):
            if index == 4:
                kill(process_tree(victim.pid)[1:])
            names.append(name)
            yield name, tensor

    deadline = time.monotonic() + 30
    with pytest.raises(WeightUpdateFailed) as error_info:
        updater.push(export_while_one_dies(), 2, admins)
    assert time.monotonic() < deadline
    assert set(error_info.value.failures) == {victim.url}
    assert error_info.value.updated_urls == (survivor.url,)
    assert names == list(weights)
    assert wait_until_dead(victim).returncode == 128 + signal.SIGKILL

    updater.close()
    assert_takes_weights(survivor, weights, 3)


def assert_takes_weights(
    engine: ManagedEngine, weights: dict[str, torch.Tensor], version: int
) -> None:
    updater = open_updater()
    updater.push(iter(weights.items()), version, [engine.admin()])
    assert asyncio.run(_sample_one(engine)) == (str(version),)
    updater.close()


async def _sample_one(engine: ManagedEngine) -> tuple[str, ...]:
    async with GenerateClient(engine.url, api_key=engine.keys.api_key) as client:
        short = SimpleNamespace(max_new_tokens=2, temperature=1.0, stop_token_ids=(), top_p=1.0)
        return (
            await client.generate([5, 6], short, rid="one", return_routes=False)
        ).weight_versions


@pytest.mark.nightly
def test_no_engine_outlives_a_killed_trainer(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINER, str(model), str(tmp_path / "engine.log")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    supervisor = int(trainer.stdout.readline())
    tree = [supervisor, *descendants(supervisor)]
    assert len(tree) >= 4  # supervisor, server, scheduler, detokenizer
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 15
    while any(map(is_alive, tree)):
        living = [pid for pid in tree if is_alive(pid)]
        assert time.monotonic() < deadline, f"{living} live 15 s after the trainer's death"
        time.sleep(0.1)
