"""A managed engine that is started again. A tiny server takes the place of SGLang."""

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_bridge.errors import EngineDied, EngineError
from sglang_bridge.keys import create_keys
from sglang_bridge.server import managed_engine
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.server.process_table import is_alive, process_tree
from sglang_bridge.settings import ServerPlace, ServerSettings
from tests.support.tiny_servers import (
    FAILING,
    SERVER,
    SILENT,
    memory_names,
    run_instead_of_sglang,
    server_pid,
)

pytestmark = pytest.mark.slow


class Code:
    """The code of the next start."""

    text = SERVER

    def __call__(self) -> str:
        return self.text


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Code:
    code = Code()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_instead_of_sglang(monkeypatch, code)
    return code


@pytest.fixture
def start(code: Code, tmp_path: Path) -> Iterator[Callable[[], ManagedEngine]]:
    with contextlib.closing(Lifeline()) as lifeline, contextlib.ExitStack() as stack:

        def start_one() -> ManagedEngine:
            engine = ManagedEngine.start(
                ServerSettings(),
                ServerPlace(model_path="/model", device="cpu"),
                keys=create_keys(),
                log_path=tmp_path / "engine.log",
                lifeline=lifeline,
            )
            stack.callback(engine.stop)
            return engine

        yield start_one


@pytest.fixture
def engine(start: Callable[[], ManagedEngine]) -> ManagedEngine:
    engine = start()
    engine.wait_healthy(20)
    return engine


def port_of(engine: ManagedEngine) -> int:
    return urllib.parse.urlsplit(engine.url).port or 0


def test_a_server_that_was_killed_answers_again_at_the_same_address(
    engine: ManagedEngine, tmp_path: Path
) -> None:
    url = engine.url
    tree = [process.pid for process in process_tree(engine.pid)]
    assert len(tree) >= 3 and engine.epoch == 0
    os.kill(server_pid(engine.pid), signal.SIGKILL)
    with pytest.raises(EngineDied, match="SIGKILL"):
        while True:
            engine.check_alive()
            time.sleep(0.02)
    assert engine.restart()
    assert (engine.epoch, engine.url) == (1, url)
    engine.wait_healthy(20)
    assert not any(map(is_alive, tree))
    old, new = memory_names(tmp_path / "engine.log")
    assert (Path("/dev/shm") / new).exists() and not (Path("/dev/shm") / old).exists()


@pytest.mark.parametrize(
    "indices",
    [
        pytest.param((0,), id="supervisor", marks=pytest.mark.nightly),
        pytest.param((1,), id="server", marks=pytest.mark.nightly),
        pytest.param((0, 1, 2), id="whole tree"),
    ],
)
def test_a_frozen_server_is_ended_and_started_again(
    engine: ManagedEngine, indices: tuple[int, ...]
) -> None:
    tree = [process.pid for process in process_tree(engine.pid)]
    for index in indices:
        os.kill(tree[index], signal.SIGSTOP)
    start = time.monotonic()
    assert engine.restart()
    assert time.monotonic() - start < 10, "the supervisor was not continued"
    assert not any(map(is_alive, tree))
    engine.wait_healthy(20)


def test_nothing_is_left_of_a_tree_whose_supervisor_was_killed(
    engine: ManagedEngine, tmp_path: Path
) -> None:
    tree = [process.pid for process in process_tree(engine.pid)]
    os.kill(tree[0], signal.SIGKILL)
    while any(map(is_alive, tree[:2])):
        time.sleep(0.02)
    assert is_alive(tree[-1]), "its child has no parent that ends it"
    assert len(list(tmp_path.glob("engine-*"))) == 1
    engine.request_end()
    while is_alive(tree[-1]):
        time.sleep(0.02)
    engine.stop()
    assert not any(map(is_alive, tree))
    assert [n for n in memory_names(tmp_path / "engine.log") if n in os.listdir("/dev/shm")] == []
    assert [path.name for path in tmp_path.iterdir()] == ["engine.log"]


def test_a_port_that_was_taken_meanwhile_is_replaced(engine: ManagedEngine) -> None:
    initial_port = port_of(engine)
    engine.request_end()
    with pytest.raises(EngineDied):
        while True:
            engine.check_alive()
            time.sleep(0.02)
    with socket.create_server(("127.0.0.1", initial_port)):
        engine.restart()
        assert port_of(engine) != initial_port
        engine.wait_healthy(20)


def test_starts_that_lose_their_port_are_one_epoch(
    engine: ManagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        choose = managed_engine.choose_port
        answers = iter([listener.getsockname()[1]])  # as if it had been free before
        monkeypatch.setattr(
            managed_engine,
            "choose_port",
            lambda host, port: next(answers, None) or choose(host, port),
        )
        engine.restart()
        assert port_of(engine) == listener.getsockname()[1]
        engine.wait_healthy(20)
        assert engine.epoch == 1 and port_of(engine) != listener.getsockname()[1]


def test_the_reason_of_an_end_is_that_of_the_last_start(engine: ManagedEngine, code: Code) -> None:
    code.text = FAILING
    engine.restart()
    with pytest.raises(EngineDied, match="OSError: no model there"):
        engine.wait_healthy(20)
    code.text = "raise SystemExit(3)"
    engine.restart()
    with pytest.raises(EngineDied, match=r"exit code 3") as error_info:
        engine.wait_healthy(20)
    assert "no model there" not in str(error_info.value) + error_info.value.log_tail
    assert "no model there" in engine.log_path.read_text()


def test_the_age_of_a_start_begins_anew(engine: ManagedEngine, code: Code) -> None:
    code.text = SILENT
    age = engine.age_seconds
    engine.restart()
    assert engine.age_seconds < age
    assert not engine.poll_healthy()
    engine.check_age(60.0)
    with pytest.raises(EngineError, match=r"raise engine\.start_timeout_s"):
        engine.check_age(0.0)


def test_a_server_that_was_stopped_is_not_started_again(engine: ManagedEngine) -> None:
    engine.stop()
    pid = engine.pid
    assert not engine.restart()
    assert engine.pid == pid and not is_alive(pid)
    assert [file.name for file in engine.log_path.parent.iterdir()] == ["engine.log"]


@pytest.mark.parametrize(
    "delay",
    [
        pytest.param(0.0, marks=pytest.mark.nightly),
        0.05,
        pytest.param(0.5, marks=pytest.mark.nightly),
    ],
)
def test_a_stop_wins_over_a_restart_in_progress(engine: ManagedEngine, delay: float) -> None:
    """Whatever the moment, nothing runs after the stop."""
    pid = engine.pid
    thread = threading.Thread(target=engine.restart)
    thread.start()
    time.sleep(delay)
    engine.stop()
    stopped_pid = engine.pid
    thread.join()
    assert engine.pid == stopped_pid
    assert not is_alive(pid) and not is_alive(stopped_pid)
