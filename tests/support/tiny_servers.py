"""Managed engines that run a tiny server instead of SGLang."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_bridge.server import managed_engine
from sglang_bridge.server.process_table import children, command_line, descendants
from sglang_bridge.settings import ServerPlace, ServerSettings

# Answers any request, holds shared memory and has a child, as SGLang does. Nobody needs it to end
# in an orderly way.
SERVER = """
import socket, subprocess, sys
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=4096)
print("memory", memory.name, flush=True)
child = subprocess.Popen(["sleep", "60"])
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(
            b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n"
        )
"""
# Never answers.
SILENT = "import time; time.sleep(60)"
FAILING = "raise OSError('no model there')"


def run_instead_of_sglang(monkeypatch: pytest.MonkeyPatch, code: Callable[[], str]) -> None:
    """Start managed engines with this code, which imports only the standard library.

    Its arguments are the port, the place where the servers of an engine meet, and its number
    among them.
    """

    def build_argv(
        settings: ServerSettings,
        place: ServerPlace,
        *,
        port: int,
        meeting: str | None = None,
        **options: Any,
    ) -> list[str]:
        words = map(str, (port, meeting, place.server_rank))
        return [sys.executable, "-S", "-c", code(), *words]

    monkeypatch.setattr(managed_engine, "build_argv", build_argv)


def supervisors(*last_words: object) -> list[int]:
    """The supervisors that this process has started and that have not ended.

    last_words: with which the command of a supervisor has to end.
    """
    ending = [str(word) for word in last_words]
    commands = {pid: command_line(pid) for pid in children(os.getpid())}
    return [
        pid
        for pid, words in commands.items()
        if "sglang_bridge.server.supervise" in words and words[len(words) - len(ending) :] == ending
    ]


def only_supervisor(*last_words: object) -> int:
    """The only supervisor whose command ends with these words.

    A process that was just started has no command for a moment.
    """
    deadline = time.monotonic() + 10
    while not (pids := supervisors(*last_words)):
        assert time.monotonic() < deadline, last_words
        time.sleep(0.01)
    (pid,) = pids
    return pid


def server_pid(supervisor: int) -> int:
    """The process id of the tiny server itself."""
    return descendants(supervisor)[0]


def memory_names(log: Path) -> list[str]:
    """The shared memory of every start, from the log of an engine."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [words[1] for words in lines if words[:1] == ["memory"]]
