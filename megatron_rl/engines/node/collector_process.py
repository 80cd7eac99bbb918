"""The collector of a node as a process that can be started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.rollouts.wire.messages import RUN_KEY_VARIABLE
from sglang_bridge.errors import EngineDied
from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.log_tail import last_exception, last_lines
from sglang_bridge.server.supervised_tree import SupervisedTree

_GRACE_SECONDS = 1.0


class CollectorProcess:
    """The collector of a node, which connects to the hub of rank 0 at host and port.

    run_key: the hub's.
    """

    def __init__(
        self, *, node: int, hub: tuple[str, int], run_key: str, log_path: Path, lifeline: Lifeline
    ) -> None:
        self._node = node
        self._hub = hub
        self._run_key = run_key
        self._log_path = log_path
        self._lifeline = lifeline
        self._tree = SupervisedTree()
        self._epoch = 0
        self._log_start = 0
        self._launch()

    @property
    def epoch(self) -> int:
        """The number of restarts so far."""
        return self._epoch

    @property
    def pid(self) -> int:
        """The process id of the collector's supervisor."""
        return self._tree.pid

    def poll_healthy(self) -> bool:
        """Return True while the process lives: the hub knows if it is connected.

        Raises `EngineDied`.
        """
        self.check_alive()
        return True

    def check_alive(self) -> None:
        """Raise `EngineDied` if the process has ended."""
        code = self._tree.exit_code
        if code is None:
            return
        log = last_lines(self._log_path, start=self._log_start)
        exception = last_exception(log)
        cause = "" if exception is None else f": {exception}"
        raise EngineDied(
            f"the collector of node {self._node} ended{cause}",
            returncode=code,
            log_path=self._log_path,
            log_tail=log,
        )

    def check_age(self, deadline_seconds: float) -> None:
        """Do nothing: a collector that lives counts as healthy."""

    def request_end(self) -> None:
        """Ask the collector and every process below it to end, and do not wait."""
        self._tree.request_end()

    def restart(self, *, timeout: float) -> bool:
        """End what is left of the collector, and start it in the next epoch. The log continues.

        timeout: after so many seconds, a process that does not end is killed.

        Returns False, and starts nothing, after `stop` began. Raises `OSError`.
        """
        self._tree.end(timeout)
        self._epoch += 1
        return self._launch()

    def stop(self, *, timeout: float) -> None:
        """End the collector and every process below it. It cannot be started again."""
        self._tree.close(timeout)

    def _launch(self) -> bool:
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()

            def start_supervisor() -> subprocess.Popen[bytes]:
                return start_supervised(
                    build_argv(self._hub, self._node, self._epoch),
                    lifeline=self._lifeline,
                    environment={**os.environ, RUN_KEY_VARIABLE: self._run_key},
                    log=log,
                    grace_seconds=_GRACE_SECONDS,
                )

            return self._tree.start(start_supervisor)


def build_argv(hub: tuple[str, int], node: int, epoch: int) -> list[str]:
    """Build the argument list of a collector."""
    host, port = hub
    return [
        sys.executable,
        "-m",
        "megatron_rl.rollouts.collector",
        host,
        str(port),
        str(node),
        str(epoch),
    ]
