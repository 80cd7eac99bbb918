"""An SGLang server that this process starts, monitors and ends."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from sglang_bridge.addresses import require_private_address
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineDied, EngineError
from sglang_bridge.keys import RunKeys, write_server_config
from sglang_bridge.server.command import build_argv, build_environment
from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.log_tail import argument_error, last_exception, last_lines
from sglang_bridge.server.ports import choose_port
from sglang_bridge.server.supervised_tree import SupervisedTree
from sglang_bridge.settings import ServerPlace, ServerSettings, server_refusals

_POLL_SECONDS = 0.25
_PORT_TAKEN = "address already in use"
_PORT_ATTEMPTS = 3
# A server has nothing to save, and SGLang takes five seconds for an orderly shutdown.
_GRACE_SECONDS = 0.5
_STOP_SECONDS = 15.0
# Where a server's processes keep their counters. A server that is killed does not remove them.
_COUNTERS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class ManagedEngine:
    """One running server. Create it with `ManagedEngine.start`.

    Of an engine over several nodes it is the server of this node.
    """

    def __init__(
        self,
        settings: ServerSettings,
        place: ServerPlace,
        *,
        keys: RunKeys,
        log_path: Path,
        lifeline: Lifeline,
        meet: Callable[[], str] | None = None,
    ) -> None:
        self.settings = settings
        self.place = place
        self.keys = keys
        self.log_path = log_path
        self._lifeline = lifeline
        self._meet = meet
        self._tree = SupervisedTree()
        self._epoch = 0
        self._healthy = False
        self._begin(place.port)

    @classmethod
    def start(
        cls,
        settings: ServerSettings,
        place: ServerPlace,
        *,
        keys: RunKeys,
        log_path: Path,
        lifeline: Lifeline,
        meet: Callable[[], str] | None = None,
    ) -> ManagedEngine:
        """Start a server and return at once.

        log_path: a file of mode 0600, because SGLang logs its arguments and thereby the keys.
        meet: returns, for each start, the host and port where the servers of an engine over several
        nodes meet.

        Raises `ValueError` for settings that `server_refusals` refuses, for parallel sizes that no
        engine has and for an address that is not private.
        """
        refusals = list(server_refusals(settings, place.device))
        if refusals:
            raise ValueError("\n".join(map(str, refusals)))
        if (settings.quantization is None) != (place.quantization is None):
            raise ValueError(
                f"engine.quantization={settings.quantization}: the server's place has "
                f"quantization={place.quantization}; give both or neither"
            )
        require_private_address(place.host)
        return cls(settings, place, keys=keys, log_path=log_path, lifeline=lifeline, meet=meet)

    @property
    def engine(self) -> Engine:
        """The server's address and parallel sizes.

        The port may change until the server is healthy, because another process may take it first.
        """
        return self._engine

    @property
    def url(self) -> str:
        """The address that the server listens on."""
        return self._engine.url

    @property
    def pid(self) -> int:
        """The process id of the server's supervisor."""
        return self._tree.pid

    @property
    def epoch(self) -> int:
        """The number of restarts so far. A start that lost its port and chose another is none."""
        return self._epoch

    @property
    def age_seconds(self) -> float:
        """The time since the last start."""
        return time.monotonic() - self._start_time

    def admin(self, *, timeout: float = 60.0) -> AdminClient:
        """A control client with this run's keys. timeout: seconds per call."""
        return AdminClient(self.engine, self.keys, timeout=timeout)

    def poll_healthy(self) -> bool:
        """Check if the server has become healthy, without waiting long.

        A server whose port another process took is started again on another port. Raises
        `EngineDied`.
        """
        if self._healthy:
            return True
        if self._lost_its_port():
            # After logging the error, SGLang may linger in its warm-up: do not wait for its end.
            self._tree.end(_STOP_SECONDS)
            self._launch(None)
        self.check_alive()
        # The server reports ready only after SGLang's own warm-up has generated tokens.
        self._healthy = self.admin().is_ready()
        if self._healthy:
            self.note_processes()
        return self._healthy

    def note_processes(self) -> None:
        """Remember the server's processes, so that all are ended even without a supervisor."""
        self._tree.note_members()

    def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until the server is healthy, at most `deadline_seconds` since its start.

        Raises `EngineError` and `EngineDied`.
        """
        while not self.poll_healthy():
            self.check_age(deadline_seconds)
            time.sleep(_POLL_SECONDS)

    def check_age(self, deadline_seconds: float) -> None:
        """Raise `EngineError` if the last start is older. Call it for unhealthy servers."""
        if self.age_seconds > deadline_seconds:
            raise EngineError(
                f"engine {self.url} was not healthy {self.age_seconds:.0f} s after its start; "
                f"raise engine.start_timeout_s or read {self.log_path}",
                log_tail=self.log_tail(),
            )

    def check_alive(self) -> None:
        """Raise `EngineDied` if the server's process has ended."""
        code = self._tree.exit_code
        if code is None:
            return
        log = self.log_tail()
        message = f"engine {self.url} ended by itself"
        parser_error = argument_error(log) if self.settings.extra_args else None
        if parser_error is not None:
            setting = f"engine.extra_args={self.settings.extra_args}"
            message = f"{setting}: SGLang refuses them: {parser_error}. Correct them; {message}"
            log = ""  # it holds only thirty lines of usage
        else:
            exception = last_exception(log)
            if exception is not None:
                message = f"{message}: {exception}"
        raise EngineDied(message, returncode=code, log_path=self.log_path, log_tail=log)

    def log_tail(self, count: int = 30) -> str:
        """The last lines of the log since the last start, with the keys blanked out."""
        secrets = (self.keys.api_key, self.keys.admin_api_key)
        return last_lines(self.log_path, count=count, secrets=secrets, start=self._log_start)

    def request_end(self) -> None:
        """Ask the server and every process below it to end, and do not wait."""
        self._tree.request_end()

    def restart(self, *, timeout: float = _STOP_SECONDS) -> bool:
        """End what is left of the server, and start it again with the same settings.

        It gets the same port, or another one if a process has taken that. The log continues.
        timeout: after so many seconds, a process that does not end is killed.

        Returns False, and starts nothing, after `stop` began. Raises `OSError`.
        """
        self._tree.end(timeout)
        self._epoch += 1
        return self._begin(urllib.parse.urlsplit(self.url).port)

    def stop(self, *, timeout: float = _STOP_SECONDS) -> None:
        """End the server and every process below it, and return when none is left.

        It cannot be started again. You may call this again, also while another thread starts the
        server.
        """
        self._tree.close(timeout)
        self._config_path().unlink(missing_ok=True)

    def _begin(self, preferred_port: int | None) -> bool:
        """Launch the server for a new epoch."""
        self._start_time = time.monotonic()
        self._attempts = 0
        self._healthy = False
        return self._launch(preferred_port)

    def _launch(self, preferred_port: int | None) -> bool:
        self._attempts += 1
        port = choose_port(self.place.host, preferred_port)
        meeting = None if self._meet is None else self._meet()
        self._engine = self._describe(port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_start = os.fstat(descriptor).st_size
        counters = Path(tempfile.gettempdir(), f"engine-{secrets.token_hex(8)}")

        def start_supervisor() -> subprocess.Popen[bytes]:
            write_server_config(self.keys, self._config_path())
            return start_supervised(
                build_argv(
                    self.settings,
                    self.place,
                    port=port,
                    key_config=self._config_path(),
                    meeting=meeting,
                ),
                lifeline=self._lifeline,
                environment=build_environment(self.settings, self.place, os.environ),
                log=descriptor,
                grace_seconds=_GRACE_SECONDS,
                scratch=(_COUNTERS_VARIABLE, counters),
            )

        try:
            os.fchmod(descriptor, 0o600)
            return self._tree.start(start_supervisor, scratch=counters)
        finally:
            os.close(descriptor)

    def _describe(self, port: int) -> Engine:
        shape = self.settings
        url = f"http://{self.place.host}:{port}"
        return Engine(
            url=url,
            node=self.place.node,
            tp=shape.tp,
            ep=shape.ep,
            quantization=shape.quantization,
            gpus=self.place.gpus,
        )

    def _config_path(self) -> Path:
        return self.log_path.with_suffix(".keys.yaml")

    def _lost_its_port(self) -> bool:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)  # skip the output of earlier starts
            text = log.read().decode(errors="replace").lower()
        return self._attempts < _PORT_ATTEMPTS and _PORT_TAKEN in text
