"""The processes a node runs beside its training ranks: SGLang engines and the collector."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.rollouts.__main__ import RUN_KEY_VARIABLE
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import RunKeys
from sglang_bridge.lifeline import Lifeline, start_supervised
from sglang_bridge.log_tail import last_lines
from sglang_bridge.server import ManagedEngine
from sglang_bridge.settings import ServerPlace

_POLL_SECONDS = 0.2


class CollectorDied(Failure):
    """The collector's process ended by itself."""

    exit_code = ExitCode.ENGINE_FAILED


class NodeServices:
    """Engines (managed mode) and the collector of one node, on this process's lifeline."""

    def __init__(self, *, node: int, log_directory: Path) -> None:
        self._node = node
        self._logs = log_directory
        self._lifeline = Lifeline()
        self._engines: list[ManagedEngine] = []
        self._collector: subprocess.Popen[bytes] | None = None

    def start_engines(self, settings: EngineSettings, places: Iterable[ServerPlace], keys: RunKeys) -> None:
        """Start servers and return at once; they load while the trainer builds its model."""
        for index, place in enumerate(places):
            log = self._logs / f"engine-{self._node}-{index}.log"
            self._engines.append(ManagedEngine.start(settings, place, keys=keys, log_path=log, lifeline=self._lifeline))

    def wait_healthy(self, deadline_seconds: float) -> list[Engine]:
        """Wait until every engine answers. Raises `EngineUnhealthy` or `EngineDied` with the log's last lines."""
        waiting = list(self._engines)
        start = time.monotonic()
        while waiting:
            if time.monotonic() - start > deadline_seconds:
                waiting[0].wait_healthy(0.0)
            waiting = [engine for engine in waiting if not engine.poll_healthy()]
            time.sleep(_POLL_SECONDS if waiting else 0.0)
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
        """Raise `EngineDied` or `CollectorDied` if a process of this node has ended."""
        for engine in self._engines:
            engine.check_alive()
        if self._collector is not None and (code := self._collector.poll()) is not None:
            tail = last_lines(self._collector_log, count=20)
            raise CollectorDied(f"the collector of node {self._node} ended with code {code}; its log ends:\n{tail}")

    def stop(self) -> None:
        """End everything; harmless to call again."""
        for engine in self._engines:
            with contextlib.suppress(EngineError):  # gone already, which is what was wanted
                engine.stop()
        if self._collector is not None and self._collector.poll() is None:
            self._collector.terminate()
            self._collector.wait(10)
        self._lifeline.close()

    @property
    def _collector_log(self) -> Path:
        return self._logs / f"collector-{self._node}.log"
