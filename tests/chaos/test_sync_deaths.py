"""Trainers and engines that die at each phase of a weight update: nothing mixed is ever served."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sglang_bridge.client import GenerateClient
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.chaos.sync_rank import NAMES, PHASES, Job, tensors_of
from tests.sglang_bridge.tiny_model import write_tiny_model
from tests.support.engines import running_engine
from tests.support.weight_receiver import ReceiverProcess, open_receivers

pytestmark = pytest.mark.chaos

SCRIPT = Path(__file__).with_name("sync_rank.py")
ROOT = Path(__file__).resolve().parents[2]
KEYS = RunKeys("key", "admin-key")
SERVES_WITHIN_SECONDS = 20.0


@pytest.fixture
def receivers(tmp_path: Path) -> Iterator[list[ReceiverProcess]]:
    with open_receivers(tmp_path, 2) as processes:
        yield processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """Two ranks of a trainer. One that ends early takes the other with it, as torchrun does."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.lines: list[str] = []
        self._job = Job(port=free_port(), **job)
        file = folder / f"job-{self._job.port}.json"
        file.write_bytes(msgspec.json.encode(self._job))
        command = [sys.executable, "-m", "tests.chaos.sync_rank", str(file)]
        self.processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for rank in (0, 1)
        ]

    def wait(self, seconds: float = 100) -> None:
        """Wait until both have ended."""
        deadline = time.monotonic() + seconds
        try:
            while any(process.poll() is None for process in self.processes):
                assert time.monotonic() < deadline, "a rank hangs"
                if any(process.poll() not in (None, 0) for process in self.processes):
                    self._kill()
                time.sleep(0.02)
        finally:
            self._kill()
        for process in self.processes:
            output, _ = process.communicate()
            self.lines += output.splitlines()

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def time_of(self, start: str) -> float:
        """The time that the line with this start ends with."""
        (line,) = [line for line in self.lines if line.startswith(start)]
        return float(line.split()[-1])

    @property
    def failures(self) -> list[str]:
        """The lines of rank 0 about engines."""
        return [line for line in self.lines if line.startswith("FAILED")]


def checksums(version: int) -> dict[str, str]:
    job = Job(port=0, urls=[], versions=[], keys=KEYS)
    result = {}
    for rank in (0, 1):
        for name, tensor in tensors_of(job, version, rank).items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
            result[name] = f"{torch.float32} {digest}"
    assert sorted(result) == NAMES
    return result


def require_nothing_mixed(receiver: ReceiverProcess) -> list[str]:
    """Require that each state that was served is whole; returns the versions."""
    serving = receiver.state()["serving"]
    for state in serving:
        assert state["weights"] == checksums(int(state["version"]))
    return [state["version"] for state in serving]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_that_dies_leaves_engines_that_the_next_run_uses(
    tmp_path: Path, receivers: list[ReceiverProcess], phase: str, rank: int
) -> None:
    if rank == 1 and phase not in ("formed", "bucket"):
        pytest.skip("rank 0 alone goes through this phase")
    urls = [receiver.url for receiver in receivers]
    ranks = Ranks(
        tmp_path, urls=urls, versions=[1, 2], keys=KEYS, rank=rank, version=2, phase=phase
    )
    ranks.wait()
    assert any(line.startswith("DEATH") for line in ranks.lines)
    assert "DONE" not in ranks.lines
    for receiver in receivers:
        versions = require_nothing_mixed(receiver)
        assert versions == (["1", "2"] if phase == "audit" else ["1"])
    next_run = Ranks(tmp_path, urls=urls, versions=[3], keys=KEYS)
    next_run.wait()
    assert "DONE" in next_run.lines and next_run.failures == []
    assert next_run.time_of("SENT 3") - next_run.time_of("READY") < SERVES_WITHIN_SECONDS
    for receiver in receivers:
        assert require_nothing_mixed(receiver)[-1] == "3"


@pytest.mark.parametrize("phase", PHASES)
def test_an_engine_that_dies_costs_its_own_lanes_only(
    tmp_path: Path, receivers: list[ReceiverProcess], phase: str
) -> None:
    victim, survivor = receivers
    ranks = Ranks(
        tmp_path,
        urls=[victim.url, survivor.url],
        versions=[1, 2, 3],
        keys=KEYS,
        rank=0,
        version=2,
        phase=phase,
        pid=victim.process.pid,
    )
    ranks.wait()
    assert "DONE" in ranks.lines
    seconds = ranks.time_of("SENT 2") - ranks.time_of("DEATH")
    print(f"{phase}: the survivor serves after {seconds:.2f} s")
    assert seconds < SERVES_WITHIN_SECONDS
    assert len(ranks.failures) == 1 and victim.url in ranks.failures[0]
    assert survivor.url not in ranks.failures[0]
    assert require_nothing_mixed(survivor) == ["1", "2", "3"]
    with open_receivers(tmp_path / "new", 1) as (replacement,):
        next_run = Ranks(tmp_path, urls=[survivor.url, replacement.url], versions=[4], keys=KEYS)
        next_run.wait()
        assert next_run.failures == []
        assert require_nothing_mixed(survivor)[-1] == "4"
        assert require_nothing_mixed(replacement) == ["4"]


def test_a_second_trainer_on_an_engine_is_noticed(
    tmp_path: Path, receivers: list[ReceiverProcess]
) -> None:
    """The second one closes the session of the first, which may be that of a dead trainer.

    The second one's sync is its first, which a run audits by value.
    """
    shared = receivers[0]
    shared.delay("/update_weights_from_distributed", 0.3)
    both = [Ranks(tmp_path, urls=[shared.url], versions=[version], keys=KEYS) for version in (1, 2)]
    for ranks in both:
        ranks.wait()
    failures = [line for ranks in both for line in ranks.failures]
    print(*failures, sep="\n")
    assert any("nother trainer" in line for line in failures)


@pytest.mark.engine
@pytest.mark.parametrize("rank", [0, 1])
def test_real_engines_serve_after_a_trainer_died_in_a_broadcast(
    tmp_path: Path, engines: list[ManagedEngine], model: Path, rank: int
) -> None:
    """SGLang gives its groups no timeout. It notices that the connection is closed."""
    urls = [engine.url for engine in engines]
    job = {"urls": urls, "keys": engines[0].keys, "weights": str(model / "model.safetensors")}
    ranks = Ranks(tmp_path, versions=[1, 2], rank=rank, version=2, phase="bucket", **job)
    ranks.wait()
    next_run = Ranks(tmp_path, versions=[3], **job)
    next_run.wait()
    assert "DONE" in next_run.lines and next_run.failures == []
    seconds = next_run.time_of("SENT 3") - ranks.time_of("DEATH")
    print(f"rank {rank}: engines serve {seconds:.1f} s after the death")
    for engine in engines:
        assert asyncio.run(versions_of_one_sample(engine)) == ("3",)


async def versions_of_one_sample(engine: ManagedEngine) -> tuple[str, ...]:
    async with GenerateClient(engine.url, api_key=engine.keys.api_key) as client:
        short = SimpleNamespace(max_new_tokens=2, temperature=1.0, stop_token_ids=(), top_p=1.0)
        generation = await client.generate([5, 6], short, rid="one", return_routes=False)
        return generation.weight_versions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ManagedEngine]]:
    keys = create_keys()
    logs = [tmp_path_factory.mktemp("logs") for _ in range(2)]
    with (
        running_engine(model, logs[0], keys=keys) as first,
        running_engine(model, logs[1], keys=keys) as second,
    ):
        yield [first, second]
