"""Runs programs of a model, each in a sandbox of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import subprocess
from dataclasses import dataclass
from typing import Literal

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.rewards.sandbox.bootstrap import OUT_OF_MEMORY, landlock_version
from megatron_rl.rewards.sandbox.bubblewrap import find_bubblewrap, has_free_ids
from megatron_rl.rewards.sandbox.control_groups import ControlGroup, ControlGroups
from megatron_rl.rewards.sandbox.launchers import StrictLauncher, WeakLauncher
from megatron_rl.rewards.sandbox.limits import Ending, Limits, ProgramResult
from megatron_rl.rewards.sandbox.process import SandboxProcess
from megatron_rl.rewards.sandbox.seccomp import filter_program

# As a shell shows the end by SIGXCPU and SIGKILL. The latter comes to a program that ignores the
# former, a second later.
_CPU_CODES = (128 + 24, 128 + 9)
_PROBE = """
import os
try:
    os.fork()
except PermissionError:
    print("limited")
"""
_WEAK = "or set reward.options.sandbox=weak, which is no protection against hostile programs"


@dataclass(frozen=True)
class Isolation:
    """The isolation of the programs of a node, for people.

    bubblewrap: path and version, "" without namespaces. user: who runs a program. landlock: the
    version of its interface, 0 without it. control_groups: the controllers that limit a program.
    """

    bubblewrap: str
    user: str
    seccomp: bool
    landlock: int
    control_groups: tuple[str, ...]

    def __str__(self) -> str:
        landlock = f"Landlock {self.landlock}" if self.landlock else "no Landlock"
        groups = f"control groups {', '.join(self.control_groups)}"
        parts = (
            self.bubblewrap or "no namespaces (reward.options.sandbox=weak)",
            self.user,
            "seccomp" if self.seccomp else "no seccomp",
            landlock,
            groups if self.control_groups else "no control groups",
        )
        return ", ".join(parts)


class Sandbox:
    """Runs programs of a model, which may be hostile, in Python with its standard library.

    A program is one process with threads, without network and other processes. It sees the
    interpreter, and writes to one small folder. SECURITY.md says what this protects.

    mode: `strict` needs bubblewrap and namespaces. `weak` has neither and protects against mistakes
    alone. concurrency: programs at the same time, by default one for each core of this process.

    Raises `Failure` if the mode is impossible here as far as one can see without a try.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        mode: Literal["strict", "weak"] = "strict",
        concurrency: int | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._mode = mode
        self._slots = asyncio.Semaphore(concurrency or len(os.sched_getaffinity(0)))
        self._groups = ControlGroups.find()
        self._launcher: StrictLauncher | WeakLauncher
        if mode == "weak":
            self._launcher = WeakLauncher(self._limits)
        else:
            self._launcher = StrictLauncher(_require_bubblewrap(), self._limits)

    async def run(self, program: str, stdin: bytes = b"") -> ProgramResult:
        """Run a program with some standard input, and return what it wrote.

        None of its processes is left afterwards, also if this call is cancelled.

        Raises RuntimeError if the sandbox fails before the program starts.
        """
        source = program.encode("utf-8", "replace")
        async with self._slots:
            with self._groups.group(self._limits) as group:
                try:
                    async with (
                        asyncio.timeout(self._limits.wall_s),
                        self._launcher.start(len(source), group) as process,
                    ):
                        return await self._finish(process, source + stdin, group)
                except TimeoutError:
                    return ProgramResult(b"", Ending.CLOCK)

    async def check(self) -> Isolation:
        """Run a harmless program, and return what isolates it.

        Raises `Failure` if programs cannot run in this mode.
        """
        try:
            result = await self.run(_PROBE)
        except (OSError, RuntimeError) as error:
            raise self._refusal(str(error)) from error
        is_limited = result.output == b"limited\n"
        if self._mode == "strict" and not is_limited:
            raise self._refusal(f"a test program was not limited ({result.ending.name})")
        return Isolation(
            bubblewrap=_describe_bubblewrap() if self._mode == "strict" else "",
            user=_describe_user(self._mode),
            seccomp=is_limited,
            landlock=max(0, landlock_version(ctypes.CDLL(None, use_errno=True))),
            control_groups=self._groups.controllers,
        )

    async def _finish(
        self, process: SandboxProcess, data: bytes, group: ControlGroup
    ) -> ProgramResult:
        output, is_too_long = await process.exchange(data, self._limits.output_bytes)
        if is_too_long:
            return ProgramResult(output, Ending.OUTPUT)
        code = await process.wait()
        ending = Ending.EXIT
        if code == OUT_OF_MEMORY or group.ran_out_of_memory():
            ending = Ending.MEMORY
        elif code in _CPU_CODES:
            ending = Ending.CPU
        return ProgramResult(output, ending, code)

    def _refusal(self, problem: str) -> Failure:
        text = f"reward.options.sandbox={self._mode}: {problem}. "
        if self._mode == "strict":
            text += (
                "The sandbox needs namespaces: allow user namespaces to this user (sysctl "
                "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0), give a "
                f"container CAP_SYS_ADMIN, {_WEAK}"
            )
        return Failure(text, ExitCode.REFUSED)


def _require_bubblewrap() -> str:
    """Return the path of bubblewrap. Raises `Failure` if strict mode is impossible."""
    path = find_bubblewrap()
    problem = ""
    if path is None:
        problem = (
            "bubblewrap (bwrap) is neither on PATH nor beside the interpreter. Install your "
            "distribution's package bubblewrap"
        )
    elif filter_program(platform.machine()) is None:
        problem = f"there is no seccomp filter for {platform.machine()}. Use x86_64 or aarch64"
    if path is None or problem:
        raise Failure(f"reward.options.sandbox=strict: {problem}, {_WEAK}", ExitCode.REFUSED)
    return path


def _describe_bubblewrap() -> str:
    path = _require_bubblewrap()
    version = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [path, "--version"]
        version = subprocess.run(
            command, env={}, capture_output=True, text=True, timeout=10, check=False
        ).stdout.strip()
    return f"{version or 'bubblewrap'} ({path})"


def _describe_user(mode: str) -> str:
    if mode == "weak":
        return f"programs run as user {os.geteuid()}"
    if has_free_ids():
        return "a user id for each program"
    return f"user {os.geteuid()} in a user namespace"
