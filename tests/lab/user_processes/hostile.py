"""A scorer that blocks, forks, eats memory and ends its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import Scorer

GOOD = Verdict(reward=1.0, correctness=1.0)
IGNORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


class Hostile(Scorer):
    """Does what the first word of a response says.

    folder: receives a file `pids` with the processes of the class and those that it starts.
    memory: bytes that each of them may allocate, 0 without a limit.
    """

    def __init__(self, folder: str, memory: int = 0) -> None:
        self.file = Path(folder) / "pids"
        if memory:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        self.note(os.getpid())
        verdict: Verdict = await getattr(self, text.split()[0])()
        return verdict

    def note(self, pid: int) -> None:
        """Write the id of a process into the file."""
        with self.file.open("a") as file:
            file.write(f"{pid}\n")

    async def after(self) -> Any:
        return GOOD

    async def waits(self) -> Any:
        await asyncio.sleep(0.3)
        return GOOD

    async def swallows(self) -> Any:
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(3600)

    async def blocks(self) -> Any:
        await asyncio.sleep(0.05)
        while True:
            pass

    async def blocks_in_a_task(self) -> Any:
        await asyncio.create_task(self.blocks())

    async def allocates(self) -> Any:
        await asyncio.sleep(0.05)
        blocks = []
        while True:
            blocks.append(bytearray(2**24))

    async def allocates_elsewhere(self) -> Any:
        code = "blocks = []\nwhile True: blocks.append(bytearray(2**24))"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        if await process.wait():
            raise MemoryError("the process that it started has failed")
        return GOOD

    async def forks(self) -> Any:
        for is_session in (False, True):
            child = subprocess.Popen([sys.executable, "-c", IGNORE], start_new_session=is_session)
            self.note(child.pid)
        if os.fork() == 0:  # a daemon: its parent is gone
            self.note(os.getpid())
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork():
                os._exit(0)
            self.note(os.getpid())
            signal.pause()
        await self.swallows()

    async def forks_without_end(self) -> Any:
        while True:
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.alarm(60)  # for a test that fails
                signal.pause()
            time.sleep(0.005)

    async def forks_and_returns(self) -> Any:
        pid = os.fork()
        if not pid:
            return GOOD
        await asyncio.sleep(0.3)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Verdict(reward=float(code), correctness=1.0)

    async def exits(self) -> Any:
        await asyncio.sleep(0.05)
        os._exit(3)

    async def exits_in_a_thread(self) -> Any:
        threading.Timer(0.1, os._exit, [4]).start()
        await asyncio.sleep(3600)

    async def raises_system_exit(self) -> Any:
        raise SystemExit(3)

    async def raises_interrupt(self) -> Any:
        raise KeyboardInterrupt

    async def prints(self) -> Any:
        for _ in range(200):
            print("x" * 100_000)
        return GOOD

    async def closes(self) -> Any:
        await asyncio.sleep(0.05)
        os.closerange(3, 4096)
        await asyncio.sleep(3600)

    async def writes(self) -> Any:
        await asyncio.sleep(0.05)
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket"):
                    os.write(descriptor, b"\xff" * 4096)
        await asyncio.sleep(3600)

    async def stops(self) -> Any:
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGSTOP)

    async def kills_its_supervisor(self) -> Any:
        threading.Timer(0.1, os.kill, [os.getppid(), signal.SIGKILL]).start()
        await asyncio.sleep(3600)

    async def returns_an_object(self) -> Any:
        return object()

    async def returns_a_lie(self) -> Any:
        return Verdict(reward="1", correctness=[], reason=5)  # type: ignore[arg-type]
