"""Runs one stage in its own process group, and reads what it prints."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.lab.gpu_check.outcome import Outcome, OutputReader
from tests.lab.gpu_check.record import Log

_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.2


class CommandStopped(BaseException):
    """The command got a signal that ends it. code: its exit code then."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"the command got {number.name}")
        self.code = 128 + number


def stage_command(
    module: str,
    choices: Sequence[str],
    scratch: Path,
    limit: float,
    *,
    small: bool,
    on_pretended: bool,
) -> list[str]:
    """The command line of a stage. limit: seconds until it is killed."""
    pretend = ["-m", "tests.lab.pretended_device"] if on_pretended else ["-m"]
    options = ["--scratch", str(scratch), "--limit", f"{limit:g}", *(["--small"] if small else [])]
    return [sys.executable, *pretend, f"tests.lab.gpu_stages.{module}", *options, *choices]


def run_stage(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    outcome: Outcome,
    log: Log,
    *,
    limit: float,
    at_limit: tuple[str, str],
    on_poll: Callable[[], None],
) -> None:
    """Run a stage and complete its outcome.

    folder: where it runs. limit: seconds after which its process group is killed. at_limit: status
    and reason then. on_poll: called several times a second. Whatever `on_poll` and the log raise,
    and `CommandStopped`, ends the stage and is raised again.
    """
    start = time.monotonic()
    reader = OutputReader(outcome)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    interruption: tuple[str, str] | None = None

    def take(data: bytes) -> None:
        log.write(data)
        reader.add(data)

    try:
        is_late = not _follow(process, start + limit, take, on_poll)
        interruption = at_limit if is_late else None
    except CommandStopped as stop:
        interruption = ("cut off", str(stop))
        raise
    finally:
        # Processes that the stage started end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        assert process.stdout is not None
        process.stdout.close()
        reader.finish(code, interruption)
        outcome.seconds = round(time.monotonic() - start, 1)


def _follow(
    process: subprocess.Popen[bytes],
    deadline: float,
    take: Callable[[bytes], None],
    on_poll: Callable[[], None],
) -> bool:
    """Read the output until the process ends. Returns False if it does not end in time.

    A process that the stage left behind may hold the pipe, so the pipe's end is not awaited.
    """
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            on_poll()
            has_ended = process.poll() is not None
            if selector.select(0 if has_ended else min(remaining, _POLL_SECONDS)):
                data = os.read(pipe, _READ_BYTES)
                if data:
                    take(data)
                    continue
                selector.unregister(pipe)  # the end of the output
            if has_ended:
                return True
    return False
