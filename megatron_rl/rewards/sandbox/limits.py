"""Limits of a program, and the result of one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

MIB = 1024**2


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    cpu_s: seconds of processor time, a whole number. Beyond it the kernel ends the program, so that
    the result repeats.
    wall_s: seconds on the clock, generous: it is there for programs that wait for nothing.
    memory_mb: address space in MiB.
    files_mb: size of the directory for files in MiB.
    output_bytes: bytes on standard output, after which the program is ended.
    threads: threads of the program.
    """

    cpu_s: int = 5
    wall_s: float = 60.0
    memory_mb: int = 512
    files_mb: int = 16
    output_bytes: int = MIB
    threads: int = 32

    def __post_init__(self) -> None:
        smallest = {
            "cpu_s": 1,
            "wall_s": 1,
            "memory_mb": 64,
            "files_mb": 1,
            "output_bytes": 1,
            "threads": 1,
        }
        for name, minimum in smallest.items():
            if getattr(self, name) < minimum:
                value = getattr(self, name)
                raise ValueError(f"{name}={value}: must be at least {minimum}. Raise it")
        if self.wall_s < 2 * self.cpu_s:
            raise ValueError(
                f"wall_s={self.wall_s}: must be at least twice cpu_s={self.cpu_s}, so that a busy "
                "machine does not end a program. Raise it"
            )


class Ending(Enum):
    """The ending of a program.

    EXIT: it ended by itself. CPU, MEMORY, OUTPUT: it ran into that limit, which repeats. CLOCK: it
    was ended at the limit of the clock, which depends on the load of the machine.
    """

    EXIT = auto()
    CPU = auto()
    MEMORY = auto()
    OUTPUT = auto()
    CLOCK = auto()


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    output: standard output, at most `Limits.output_bytes`. The program wrote it: whatever it says
    about itself may be a lie.
    exit_code: for messages alone, because a program chooses it. None if the program was ended.
    """

    output: bytes
    ending: Ending
    exit_code: int | None = None
