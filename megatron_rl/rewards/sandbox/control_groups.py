"""Control groups of programs: a limit of processes and of memory, where the kernel lets us."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.rewards.sandbox.limits import MIB, Limits

_PREFIX = "megatron-rl-program"
# What a group counts beside the program: bubblewrap, the interpreter's files, pages of the kernel
_OTHER_MIB = 64
_OTHER_PROCESSES = 4


@dataclass(frozen=True)
class _Hierarchy:
    """A folder in which this process can make groups. version: of control groups, 1 or 2."""

    controllers: tuple[str, ...]
    folder: Path
    version: int


@dataclass(frozen=True)
class ControlGroup:
    """The control group of one program, a folder in each hierarchy."""

    folders: tuple[Path, ...]

    def add(self, process: int) -> None:
        """Move a process into the group. Its children are then born there."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(process))

    def ran_out_of_memory(self) -> bool:
        """Return True if the kernel ended a process of the group for its memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    if re.search(r"^oom_kill [1-9]", (folder / name).read_text(), re.MULTILINE):
                        return True
        return False


class ControlGroups:
    """Makes control groups below the one of this process, or beside it with version 2."""

    def __init__(self, hierarchies: tuple[_Hierarchy, ...]) -> None:
        self._hierarchies = hierarchies
        self._left: list[Path] = []

    @classmethod
    def find(cls) -> ControlGroups:
        """Return the groups that this process may make, which may be none."""
        hierarchies = []
        missing = {"pids", "memory"}
        for candidate in _candidates():
            useful = tuple(name for name in candidate.controllers if name in missing)
            hierarchy = _Hierarchy(useful, candidate.folder, candidate.version)
            if useful and _is_usable(hierarchy):
                hierarchies.append(hierarchy)
                missing -= set(useful)
        return cls(tuple(hierarchies))

    @property
    def controllers(self) -> tuple[str, ...]:
        """Return the names of the controllers: `pids`, `memory`, both or none."""
        names = (hierarchy.controllers for hierarchy in self._hierarchies)
        return tuple(name for group in names for name in group)

    @contextlib.contextmanager
    def group(self, limits: Limits) -> Iterator[ControlGroup]:
        """Make the group of one program, and remove it at the end."""
        folders: list[Path] = []
        try:
            for hierarchy in self._hierarchies:
                folder = hierarchy.folder / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
                folder.mkdir()
                folders.append(folder)
                _write_limits(hierarchy, folder, limits)
            yield ControlGroup(tuple(folders))
        finally:
            self._remove([*folders, *self._left])

    def _remove(self, folders: list[Path]) -> None:
        """Remove groups. The kernel may need a moment to forget the processes of the last one."""
        self._left = []
        for folder in folders:
            try:
                folder.rmdir()
            except OSError:
                self._left.append(folder)


def _write_limits(hierarchy: _Hierarchy, folder: Path, limits: Limits) -> None:
    memory = limits.memory_mb + limits.files_mb + _OTHER_MIB
    values = {
        "pids": ("pids.max", limits.threads + _OTHER_PROCESSES),
        "memory": (
            "memory.limit_in_bytes" if hierarchy.version == 1 else "memory.max",
            memory * MIB,
        ),
    }
    for controller in hierarchy.controllers:
        name, value = values[controller]
        (folder / name).write_text(str(value))


def _is_usable(hierarchy: _Hierarchy) -> bool:
    """Return True if this process can make a group with limits, and remove it."""
    try:
        _remove_stale(hierarchy.folder)
        with ControlGroups((hierarchy,)).group(Limits()):
            return True
    except OSError:
        return False


def _remove_stale(folder: Path) -> None:
    """Remove the groups of processes that were killed."""
    for group in folder.glob(f"{_PREFIX}-*"):
        process = group.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if not Path("/proc", process).exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _candidates() -> Iterator[_Hierarchy]:
    """Yield the folders of this process's groups, and of those above with version 2.

    With version 2, a group that has processes gives its children no controller.
    """
    groups = [line.split(":", 2)[1:] for line in _lines("/proc/self/cgroup")]
    for mount in _lines("/proc/self/mountinfo"):
        fields, _, rest = mount.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        root, point = fields.split(" ")[3:5]
        controllers = set(options.split(" ")[-1].split(",")) if kind == "cgroup" else {""}
        paths = [path for names, path in groups if controllers & set(names.split(","))]
        if kind not in ("cgroup", "cgroup2") or not paths:
            continue
        folder = Path(point) / paths[0].removeprefix(root.rstrip("/")).lstrip("/")
        if kind == "cgroup":
            yield _Hierarchy(tuple(sorted(controllers)), folder, 1)
        else:
            yield _Hierarchy(("pids", "memory"), folder, 2)
            if folder != Path(point):
                yield _Hierarchy(("pids", "memory"), folder.parent, 2)


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []
