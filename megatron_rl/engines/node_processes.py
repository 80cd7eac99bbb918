"""Starts and ends the processes of a node besides its ranks: SGLang engines and the collector."""

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
from megatron_rl.rollouts.messages import RUN_KEY_VARIABLE
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError, describe_exit
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
    """The collector's process ended by itself. log_tail: the last lines of its log."""

    exit_code = ExitCode.ENGINE_FAILED

    def __init__(self, message: str, *, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class NodeProcesses:
    """The managed engines and the collector of one node. They end when this process ends."""

    def __init__(self, *, node: int, log_directory: Path) -> None:
        self._node = node
        self._log_directory = log_directory
        self._lifeline = Lifeline()
        self._engines: list[ManagedEngine] = []
        self._collector: subprocess.Popen[bytes] | None = None
        self._frozen_processes = FrozenProcesses()
        # The watchdog checks, and so does the main thread while it waits
        self._check_lock = threading.Lock()
        # Noted while the engines are healthy: it is unknown once their processes are dead
        self._shared_memory: set[Path] = set()

    def start_engines(
        self, settings: EngineSettings, places: Iterable[ServerPlace], keys: RunKeys
    ) -> None:
        """Start servers without waiting for them: they load while the trainer builds its model."""
        for index, place in enumerate(places):
            log_path = self._log_directory / f"engine-{self._node}-{index}.log"
            engine = ManagedEngine.start(
                settings, place, keys=keys, log_path=log_path, lifeline=self._lifeline
            )
            self._engines.append(engine)

    def wait_healthy(self, timeout_seconds: float) -> list[Engine]:
        """Wait until every engine answers.

        Raises `EngineUnhealthy` or `EngineDied` with the last lines of the log.
        """
        unhealthy = list(self._engines)
        start = time.monotonic()
        while unhealthy:
            if time.monotonic() - start > timeout_seconds:
                # Raises, with the log of this engine
                unhealthy[0].wait_healthy(0.0)
            unhealthy = [engine for engine in unhealthy if not engine.poll_healthy()]
            if unhealthy:
                time.sleep(_POLL_SECONDS)
        self._shared_memory = mapped_shared_memory(process.pid for process in self._processes())
        return [engine.engine for engine in self._engines]

    def start_collector(self, hub: tuple[str, int], run_key: str) -> None:
        """Start the collector. hub: host and port of rank 0's hub."""
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
        """Raise `EngineDied`, `CollectorDied` or `ProcessFrozen` if a process cannot answer."""
        for engine in self._engines:
            engine.check_alive()
        self._check_collector()
        with self._check_lock:
            self._frozen_processes.check(self._root_pids)

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """End all processes at the same time. Safe to call twice.

        A process that does not end within `timeout_seconds` is killed.
        """
        processes = self._processes()
        shared_memory = mapped_shared_memory(process.pid for process in processes)
        with ThreadPoolExecutor(max_workers=len(self._engines) + 1) as pool:
            pool.submit(self._stop_collector, timeout_seconds)
            for engine in self._engines:
                pool.submit(_stop_engine, engine, timeout_seconds)
        # A supervisor that was stopped or killed leaves its processes behind
        kill(processes)
        remove_shared_memory(self._shared_memory | shared_memory)
        self._lifeline.close()

    def _check_collector(self) -> None:
        if self._collector is None:
            return
        code = self._collector.poll()
        if code is not None:
            raise CollectorDied(
                f"the collector of node {self._node} ended ({describe_exit(code)}); see "
                f"{self._collector_log}",
                log_tail=last_lines(self._collector_log),
            )

    def _stop_collector(self, timeout_seconds: float) -> None:
        if self._collector is None or self._collector.poll() is not None:
            return
        self._collector.terminate()
        try:
            self._collector.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._collector.kill()

    def _processes(self) -> list[psutil.Process]:
        return [process for pid in self._root_pids.values() for process in process_tree(pid)]

    @property
    def _root_pids(self) -> dict[str, int]:
        """The ids of the topmost processes: one for each engine, and one for the collector."""
        pids = {f"engine {engine.url}": engine.pid for engine in self._engines}
        if self._collector is not None:
            pids[f"the collector of node {self._node}"] = self._collector.pid
        return pids

    @property
    def _collector_log(self) -> Path:
        return self._log_directory / f"collector-{self._node}.log"


def _stop_engine(engine: ManagedEngine, timeout_seconds: float) -> None:
    # It may have ended already, or the disk has no space to record a removal
    with contextlib.suppress(EngineError, OSError):
        engine.stop(timeout=timeout_seconds)
