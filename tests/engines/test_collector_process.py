"""A collector that is started again. Other code takes its place."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.engines.node import collector_process
from megatron_rl.engines.node.collector_process import CollectorProcess, build_argv
from megatron_rl.rollouts.wire.messages import RUN_KEY_VARIABLE
from sglang_bridge.errors import EngineDied
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.process_table import is_alive, process_tree

PRINT_ARGUMENTS = f"""
import os, sys
print(*sys.argv[1:], os.environ["{RUN_KEY_VARIABLE}"])
raise SystemExit(3)
"""


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CollectorProcess]]:
    with contextlib.closing(Lifeline()) as lifeline, contextlib.ExitStack() as stack:

        def start_one(code: str) -> CollectorProcess:
            def build_argv(hub: tuple[str, int], node: int, epoch: int) -> list[str]:
                return [sys.executable, "-c", code, str(hub), str(node), str(epoch)]

            monkeypatch.setattr(collector_process, "build_argv", build_argv)
            collector = CollectorProcess(
                node=2,
                hub=("host", 7),
                run_key="key",
                log_path=tmp_path / "collector-2.log",
                lifeline=lifeline,
            )
            stack.callback(collector.stop, timeout=5.0)
            return collector

        yield start_one


def wait_for_end(collector: CollectorProcess) -> EngineDied:
    with pytest.raises(EngineDied) as error_info:
        while collector.poll_healthy():
            time.sleep(0.02)
    return error_info.value


def test_the_command_names_the_hub_the_node_and_the_epoch() -> None:
    assert build_argv(("10.0.0.1", 7), 2, 5)[1:] == [
        "-m", "megatron_rl.rollouts.collector", "10.0.0.1", "7", "2", "5",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_restart_has_the_same_arguments_and_the_next_epoch(
    start: Callable[..., CollectorProcess], tmp_path: Path
) -> None:
    collector = start(PRINT_ARGUMENTS)
    error = wait_for_end(collector)
    log_path = tmp_path / "collector-2.log"
    assert str(error) == f"the collector of node 2 ended (exit code 3); see {log_path}"
    assert collector.restart(timeout=5.0)
    assert collector.epoch == 1
    assert wait_for_end(collector).log_tail == "('host', 7) 2 1 key"
    assert log_path.read_text() == "('host', 7) 2 0 key\n('host', 7) 2 1 key\n"


def test_the_end_of_a_collector_names_its_exception(
    start: Callable[..., CollectorProcess],
) -> None:
    error = wait_for_end(start("raise KeyError('no scorer')"))
    assert "the collector of node 2 ended: KeyError: 'no scorer' (exit code 1); see" in str(error)
    assert "Traceback" in error.log_tail


def test_a_collector_that_was_stopped_is_not_started_again(
    start: Callable[..., CollectorProcess],
) -> None:
    collector = start("import time; time.sleep(60)")
    pids = [process.pid for process in process_tree(collector.pid)]
    collector.stop(timeout=5.0)
    assert not collector.restart(timeout=5.0)
    assert not any(map(is_alive, [*pids, collector.pid]))
