"""The first code in a sandbox: it limits its own process, then runs the program in its place.

The interpreter of the sandbox runs this file as text, with the standard library alone. Arguments
are `name=value`. Standard input holds the program, `length` bytes, then the input of the program.
Before the program runs, the process writes `READY` to standard output. Another first byte means
that the sandbox failed, and not the program.

Imports are few, because they take most of the time of a short program.
"""

import builtins
import ctypes
import os
import resource
import struct
import sys

READY = b"+"
OUT_OF_MEMORY = 113  # exit code of a program that did not catch MemoryError

# Landlock's system calls, the same on x86_64 and aarch64
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_ASK_VERSION = 1
_RULE_PATH = 1
# Rights of Landlock by the version that has them. Execution is not granted anywhere.
_READ = 1 << 2 | 1 << 3  # files, directories
_WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12  # and remove and make, links too
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_FILES_BY_VERSION = ((1, (1 << 13) - 1), (2, _REFER), (3, _TRUNCATE), (5, 1 << 15))
_NETWORK_SINCE = 4
_SCOPES_SINCE = 6

_SET_DEATH_SIGNAL = 1
_SET_SECCOMP = 22
_SECCOMP_FILTER = 2
_SET_NO_NEW_PRIVILEGES = 38


def main() -> None:
    """Limit this process and run the program."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    libc = ctypes.CDLL(None, use_errno=True)
    program = _read_exactly(int(options["length"]))
    if "parent" in options:
        _die_with(libc, int(options["parent"]))
    _set_limits(options)
    restrict_files(libc, options["read"].split(":"), options["write"].split(":"))
    if "id" in options:
        _take_id(int(options["id"]))
    if "seccomp" in options:
        _check(libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, _filter(options["seccomp"]), 0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    os.write(1, READY)
    _run(program)


def landlock_version(libc: ctypes.CDLL) -> int:
    """Return the version of Landlock's interface, 0 or less without Landlock."""
    return int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION))


def restrict_files(libc: ctypes.CDLL, readable: list[str], writable: list[str]) -> None:
    """Let this process read and write in some folders alone, with Landlock, where there is one.

    It may not execute files, use TCP, or reach other processes by signals or abstract sockets.
    """
    version = landlock_version(libc)
    if version < 1:
        return
    rights = 0
    for since, bits in _FILES_BY_VERSION:
        rights |= bits if version >= since else 0
    fields = [rights]
    fields += [3] if version >= _NETWORK_SINCE else []
    fields += [3] if version >= _SCOPES_SINCE else []
    ruleset = struct.pack(f"={len(fields)}Q", *fields)
    rules = _check(libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0))
    write = (_READ | _WRITE | _REFER | _TRUNCATE) & rights
    _allow(libc, rules, readable, _READ)
    _allow(libc, rules, writable, write)
    # A right for a directory is invalid for a file
    _allow(libc, rules, [os.devnull], write & (1 << 1 | 1 << 2 | _TRUNCATE))
    _check(libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _check(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, paths: list[str], rights: int) -> None:
    for path in paths:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, place)
        _check(libc.syscall(_ADD_RULE, rules, _RULE_PATH, rule, 0))
        os.close(place)


def _set_limits(options: dict[str, str]) -> None:
    seconds = int(options["cpu"])
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (int(options["memory"]), int(options["memory"])),
        resource.RLIMIT_FSIZE: (int(options["files"]), int(options["files"])),
        resource.RLIMIT_NOFILE: (64, 64),
    }
    if "threads" in options:
        limits[resource.RLIMIT_NPROC] = (int(options["threads"]), int(options["threads"]))
    for name, limit in limits.items():
        resource.setrlimit(name, limit)


def _take_id(number: int) -> None:
    """Give up the identity of root. The capabilities go with it."""
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def _die_with(libc: ctypes.CDLL, parent: int) -> None:
    _check(libc.prctl(_SET_DEATH_SIGNAL, 9, 0, 0, 0))
    if os.getppid() != parent:
        raise RuntimeError("the parent has ended")


def _filter(text: str) -> ctypes.Array[ctypes.c_char]:
    """Return `struct sock_fprog` of a seccomp filter in hexadecimal digits."""
    instructions = ctypes.create_string_buffer(bytes.fromhex(text))
    count = len(text) // 16
    program = struct.pack("@HP", count, ctypes.addressof(instructions))
    buffer = ctypes.create_string_buffer(program)
    buffer.instructions = instructions  # type: ignore[attr-defined]  # lives as long
    return buffer


def _check(value: int) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value


def _read_exactly(length: int) -> bytes:
    pieces = []
    while length:
        piece = os.read(0, min(length, 1 << 20))
        if not piece:
            raise RuntimeError("the program is cut off")
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _run(program: bytes) -> None:
    """Run the program as `__main__`, so that it finds nothing of this file there."""
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = builtins
    # `site` would define them, which is left out
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
