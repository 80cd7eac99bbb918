"""The processes a node runs beside its training ranks: SGLang engines and the collector."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.frozen_processes import FrozenProcesses
from megatron_rl.rollouts.__main__ import RUN_KEY_VARIABLE
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError, how_it_ended
from sglang_bridge.keys import RunKeys
from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.log_tail import last_lines
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.server.process_table import kill, process_tree
from sglang_bridge.server.shared_memory import mapped_shared_memory, remove_shared_memory
from sglang_bridge.settings import ServerPlace

_POLL_SECONDS = 0.2
_STOP_SECONDS = 15.0


class CollectorDied(Failure):
    """The collector's process ended by itself."""

    exit_code = ExitCode.ENGINE_FAILED


class NodeProcesses:
    """Engines (managed mode) and the collector of one node, on this process's lifeline."""

    def __init__(self, *, node: int, log_directory: Path) -> None:
        self._node = node
        self._logs = log_directory
        self._lifeline = Lifeline()
        self._engines: list[ManagedEngine] = []
        self._collector: subprocess.Popen[bytes] | None = None
        self._pulse = FrozenProcesses()
        self._looking = threading.Lock()
        self._shared_memory: set[Path] = set()  # of engines that are healthy; dead ones do not tell

    def start_engines(
        self, settings: EngineSettings, places: Iterable[ServerPlace], keys: RunKeys
    ) -> None:
        """Start servers and return at once; they load while the trainer builds its model."""
        for index, place in enumerate(places):
            log = self._logs / f"engine-{self._node}-{index}.log"
            self._engines.append(
                ManagedEngine.start(
                    settings, place, keys=keys, log_path=log, lifeline=self._lifeline
                )
            )

    def wait_healthy(self, deadline_seconds: float) -> list[Engine]:
        """Wait until every engine answers.

        Raises `EngineUnhealthy` or `EngineDied` with the log's last lines.
        """
        waiting = list(self._engines)
        start = time.monotonic()
        while waiting:
            if time.monotonic() - start > deadline_seconds:
                waiting[0].wait_healthy(0.0)
            waiting = [engine for engine in waiting if not engine.poll_healthy()]
            time.sleep(_POLL_SECONDS if waiting else 0.0)
        self._shared_memory = mapped_shared_memory(process.pid for process in self._processes())
        return [engine.engine for engine in self._engines]

    def start_collector(self, hub: tuple[str, int], run_key: str) -> None:
        """Start the collector; it connects to rank 0's hub."""
        host, port = hub
        with self._collector_log.open("ab") as log:
            self._collector = start_supervised(
                [sys.executable, "-m", "megatron_rl.rollouts", host, str(port), str(self._node)],
                lifeline=self._lifeline,
                environment={**os.environ, RUN_KEY_VARIABLE: run_key},
                log=log,
                grace_seconds=1.0,
            )

    def check(self) -> None:
        """Raise `EngineDied`, `CollectorDied` or `ProcessStopped` if a process of this node will
        not answer again.
        """
        for engine in self._engines:
            engine.check_alive()
        if self._collector is not None and (code := self._collector.poll()) is not None:
            tail = last_lines(self._collector_log, count=20)
            end = f"the collector of node {self._node} ended ({how_it_ended(code)})"
            raise CollectorDied(f"{end}; its log ends:\n{tail}")
        with self._looking:  # the watch looks, and so does the main thread while it waits
            self._pulse.look(self._supervisors)

    def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """End everything at once; harmless to call again. What does not end in `seconds` is killed."""
        trees = self._processes()
        shared_memory = self._shared_memory | mapped_shared_memory(process.pid for process in trees)
        with ThreadPoolExecutor(max_workers=len(self._engines) + 1) as pool:
            pool.submit(self._stop_collector, seconds)
            for engine in self._engines:
                pool.submit(_stop_engine, engine, seconds)
        kill(trees)  # what a supervisor that was stopped or killed leaves behind
        remove_shared_memory(shared_memory)
        self._lifeline.close()

    def _stop_collector(self, seconds: float) -> None:
        if self._collector is None or self._collector.poll() is not None:
            return
        self._collector.terminate()
        try:
            self._collector.wait(seconds)
        except subprocess.TimeoutExpired:
            self._collector.kill()

    def _processes(self) -> list[psutil.Process]:
        return [process for pid in self._supervisors.values() for process in process_tree(pid)]

    @property
    def _supervisors(self) -> dict[str, int]:
        """The topmost process of each engine and of the collector."""
        found = {f"engine {engine.url}": engine.pid for engine in self._engines}
        if self._collector is not None:
            found[f"the collector of node {self._node}"] = self._collector.pid
        return found

    @property
    def _collector_log(self) -> Path:
        return self._logs / f"collector-{self._node}.log"


def _stop_engine(engine: ManagedEngine, seconds: float) -> None:
    with contextlib.suppress(
        EngineError, OSError
    ):  # gone already, or a disk without room for a removal
        engine.stop(timeout=seconds)
