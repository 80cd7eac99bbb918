"""A real engine that is killed: its node starts it again, and it answers as before."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.config.schema import EngineSettings
from megatron_rl.engines.node.node_board import NodeBoard
from megatron_rl.engines.node.node_keeper import NodeKeeper
from megatron_rl.engines.node.node_processes import NodeProcesses
from megatron_rl.engines.node.node_reports import EngineReport, ProcessState
from sglang_bridge.admin import AdminClient
from sglang_bridge.client import GenerateClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.server.process_table import descendants, is_alive
from sglang_bridge.settings import ServerPlace
from tests.sglang_bridge.tiny_model import write_tiny_model
from tests.support.tiny_servers import supervisors

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

START_SECONDS = 240.0
# These change with the load of an engine, or with its start
STATE = ("internal_states", "startup_time")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[NodeProcesses]:
    processes = NodeProcesses(node=0, log_directory=tmp_path)
    yield processes
    processes.stop()


async def sample(engine: Engine, keys: RunKeys) -> tuple[list[int], list[str]]:
    """Tokens that the engine's seed decides, and the version of its weights."""
    async with GenerateClient(engine.url, api_key=keys.api_key) as client:
        sampling = SimpleNamespace(
            max_new_tokens=8, temperature=1.0, stop_token_ids=(), top_p=1.0, seed=5
        )
        answer = await client.generate([5, 6], sampling, rid="one", return_routes=False)
        return list(answer.output_ids), list(answer.weight_versions)


def settings_of(engine: Engine, keys: RunKeys) -> dict[str, Any]:
    info = AdminClient(engine, keys).server_info()
    return {name: value for name, value in info.items() if name not in STATE}


def start_engine(processes: NodeProcesses, model: Path, keys: RunKeys) -> Engine:
    settings = replace(EngineSettings(), max_running_requests=8, max_total_tokens=1024)
    place = ServerPlace(model_path=str(model), device="cpu", seed=3)
    processes.start_engines(settings, [place], keys)
    (engine,) = processes.wait_healthy(START_SECONDS)
    return engine


def wait_for_report(board: NodeBoard, epoch: int, state: ProcessState) -> EngineReport:
    deadline = time.monotonic() + START_SECONDS
    while True:
        for report in board.read_reports([0]):
            for engine in report.engines:
                if (engine.epoch, engine.state) == (epoch, state):
                    return engine
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_engine_that_was_killed_answers_again_in_the_next_epoch(
    processes: NodeProcesses, tmp_path: Path
) -> None:
    keys = create_keys()
    engine = start_engine(processes, write_tiny_model(tmp_path / "model"), keys)
    info = settings_of(engine, keys)
    answer = asyncio.run(sample(engine, keys))
    (supervisor,) = supervisors()
    tree = [supervisor, *descendants(supervisor)]
    assert len(tree) >= 4  # supervisor, server, scheduler, detokenizer

    log: list[str] = []
    board = NodeBoard(dist.HashStore())
    keeper = NodeKeeper(processes, board, log=log.append)
    wait_for_report(board, 0, ProcessState.RUNNING)
    os.kill(tree[1], signal.SIGKILL)
    report = wait_for_report(board, 1, ProcessState.RUNNING)

    assert not any(map(is_alive, tree))
    assert "SIGKILL" in report.reason
    assert settings_of(report.engine, keys) == info
    assert asyncio.run(sample(report.engine, keys)) == answer
    assert len(log) == 2 and "answers again after" in log[1]
    print(*log, sep="\n")
    keeper.check()
    keeper.close()
