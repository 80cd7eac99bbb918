"""An SGLang server that this process starts, watches and ends."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from sglang_bridge.addresses import require_private_address
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineDied, EngineUnhealthy
from sglang_bridge.keys import RunKeys, write_server_config
from sglang_bridge.server.command import build_argv, build_environment
from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.log_tail import last_exception, last_lines, refused_arguments
from sglang_bridge.server.ports import choose_port
from sglang_bridge.settings import ServerPlace, ServerSettings, server_refusals

_POLL_SECONDS = 0.25
_PORT_TAKEN = "address already in use"
_PORT_ATTEMPTS = 3
_GRACE_SECONDS = (
    0.5  # a server has nothing to save, and SGLang takes five seconds over a polite end
)


class ManagedEngine:
    """One running server. Make it with `ManagedEngine.start`."""

    def __init__(
        self,
        settings: ServerSettings,
        place: ServerPlace,
        *,
        keys: RunKeys,
        log_path: Path,
        lifeline: Lifeline,
    ) -> None:
        self.settings = settings
        self.place = place
        self.keys = keys
        self.log_path = log_path
        self._lifeline = lifeline
        self._started = time.monotonic()
        self._starts = 0
        self._healthy = False
        self._launch(place.port)

    @classmethod
    def start(
        cls,
        settings: ServerSettings,
        place: ServerPlace,
        *,
        keys: RunKeys,
        log_path: Path,
        lifeline: Lifeline,
    ) -> ManagedEngine:
        """Start a server and return at once. Its log, of mode 0600, holds its keys: SGLang writes
        its arguments.

        Raises `ValueError` for what `server_refusals` finds, a shape that no engine has and an address
        that is not private.
        """
        if found := [str(problem) for problem in server_refusals(settings, place.device)]:
            raise ValueError("\n".join(found))
        require_private_address(place.host)
        return cls(settings, place, keys=keys, log_path=log_path, lifeline=lifeline)

    @property
    def engine(self) -> Engine:
        """Its address and shape.

        Until it is healthy, a port that was taken meanwhile is replaced by another one.
        """
        return self._engine

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._engine.url

    @property
    def pid(self) -> int:
        """Process id of its supervisor."""
        return self._process.pid

    def admin(self, *, timeout: float = 60.0) -> AdminClient:
        """A control client with this run's keys."""
        return AdminClient(self.engine, self.keys, timeout=timeout)

    def poll_healthy(self) -> bool:
        """Whether it has become healthy, without waiting long.

        Raises `EngineDied`; a taken port is replaced.
        """
        if self._healthy:
            return True
        if (
            self._lost_its_port()
        ):  # SGLang says so and then may linger in its warm-up: do not wait for its end
            self._end(timeout=15.0)
            self._launch(None)
        self.check_alive()
        self._healthy = (
            self.admin().is_ready()
        )  # only after SGLang's own warm-up has generated tokens
        return self._healthy

    def wait_healthy(self, deadline_seconds: float) -> None:
        """Wait until healthy, at most `deadline_seconds` since the start.

        Raises `EngineUnhealthy`, `EngineDied`.
        """
        while not self.poll_healthy():
            if (waited := time.monotonic() - self._started) > deadline_seconds:
                raise EngineUnhealthy(
                    f"engine {self.url} was not healthy {waited:.0f} s after its start; raise "
                    f"engine.start_timeout_s or read {self.log_path}",
                    log_tail=self.log_tail(),
                )
            time.sleep(_POLL_SECONDS)

    def check_alive(self) -> None:
        """Raise `EngineDied` if the server's process has ended."""
        code = self._process.poll()
        if code is not None:
            log = self.log_tail()
            why = f"engine {self.url} ended by itself"
            if self.settings.extra_args and (said := refused_arguments(log)):
                why = f"engine.extra_args={self.settings.extra_args}: SGLang refuses them: {said}. Correct them; {why}"
                log = ""  # thirty lines of usage
            elif said := last_exception(log):
                why = f"{why}: {said}"
            raise EngineDied(why, returncode=code, log_tail=log)

    def log_tail(self, count: int = 30) -> str:
        """The last lines of its log, keys blanked out."""
        return last_lines(
            self.log_path, count=count, secrets=(self.keys.api_key, self.keys.admin_api_key)
        )

    def stop(self, *, timeout: float = 15.0) -> None:
        """End the server and every process below it; returns when none is left. Safe to call again."""
        self._end(timeout)
        self._config_path().unlink(missing_ok=True)

    def _end(self, timeout: float) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:  # the supervisor itself hangs: its child dies with it
                self._process.kill()
                self._process.wait()

    def _launch(self, preferred_port: int | None) -> None:
        self._starts += 1
        port = choose_port(self.place.host, preferred_port)
        self._engine = self._describe(port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        write_server_config(self.keys, self._config_path())
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_start = os.fstat(descriptor).st_size
        try:
            os.fchmod(descriptor, 0o600)
            self._process = start_supervised(
                build_argv(self.settings, self.place, port=port, key_config=self._config_path()),
                lifeline=self._lifeline,
                environment=build_environment(self.settings, self.place, os.environ),
                log=descriptor,
                grace_seconds=_GRACE_SECONDS,
            )
        finally:
            os.close(descriptor)

    def _describe(self, port: int) -> Engine:
        shape = self.settings
        url = f"http://{self.place.host}:{port}"
        return Engine(
            url=url, node=self.place.node, tp=shape.tp, ep=shape.ep, quantization=shape.quantization
        )

    def _config_path(self) -> Path:
        return self.log_path.with_suffix(".keys.yaml")

    def _lost_its_port(self) -> bool:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)  # what an earlier start wrote does not count
            said = log.read().decode(errors="replace").lower()
        return self._starts < _PORT_ATTEMPTS and _PORT_TAKEN in said
