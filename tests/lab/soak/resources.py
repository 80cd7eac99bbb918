"""Memory, descriptors and files of a run over time, and how much they grow."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from tests.lab.faults.injection import mapped_files
from tests.support.jobs import command_line

# By a part of the command line. The first one that fits counts.
_KINDS = {
    "sglang_bridge.server.supervise": "supervisor",
    "sglang::scheduler": "engine, scheduler",
    "sglang::detokenizer": "engine, detokenizer",
    "sglang.launch_server": "engine, server",
    "megatron_rl.rollouts.user_process": "user-defined class",
    "megatron_rl.rollouts": "collector",
    "launch/": "rank",
}
_MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """The resources of a run at a moment.

    seconds: since the start. counts: processes by kind. memory: resident bytes by kind.
    descriptors: open files by kind of process. targets: open files of each kind of process by what
    they refer to. files: in the directory of the run. shared_memory: bytes of the files in /dev/shm
    that the run has ever mapped.
    """

    seconds: float
    counts: Counter[str]
    memory: Counter[str]
    descriptors: Counter[str]
    targets: dict[str, Counter[str]]
    files: int
    shared_memory: int


@dataclass(frozen=True)
class Growth:
    """The growth of a quantity between two times. unit: its unit."""

    name: str
    before: float
    after: float
    unit: str

    @property
    def share(self) -> float:
        """The growth as a share of the first value."""
        return self.after / self.before - 1 if self.before else float(self.after > 0)


@dataclass
class ResourceLog:
    """Samples of a run. directory: the run's."""

    directory: Path
    samples: list[Sample] = field(default_factory=list)
    _shared_files: set[Path] = field(default_factory=set)

    def take(self, seconds: float, processes: Sequence[psutil.Process]) -> None:
        """Take a sample of processes, and of files."""
        self._shared_files |= mapped_files(processes)
        counts = Counter[str]()
        memory = Counter[str]()
        descriptors = Counter[str]()
        targets: dict[str, Counter[str]] = {}
        for process in processes:
            kind = kind_of(command_line(process))
            with contextlib.suppress(psutil.Error, OSError):
                resident = process.memory_info().rss
                num_open = process.num_fds()
                counts[kind] += 1
                memory[kind] += resident
                descriptors[kind] += num_open
                targets.setdefault(kind, Counter()).update(descriptor_targets(process.pid))
        self.samples.append(
            Sample(
                seconds=seconds,
                counts=counts,
                memory=memory,
                descriptors=descriptors,
                targets=targets,
                files=sum(1 for _ in self.directory.rglob("*")),
                shared_memory=sum(map(_size, self._shared_files)),
            )
        )

    def growth(self, start: float, window: float) -> list[Growth]:
        """Return the growth between the first `window` seconds after `start` and the last ones.

        Processes are counted where all of their kind lived: a kind without such a sample in both
        windows has no row.
        """
        end = self.samples[-1].seconds
        early = [s for s in self.samples if start <= s.seconds < start + window]
        late = [s for s in self.samples if s.seconds >= end - window]
        if not early or not late:
            return []
        rows = []
        for kind in sorted({kind for sample in late for kind in sample.counts} - {""}):
            rows += _growth_of_kind(kind, early, late)
        pairs = [(median(s.files for s in side)) for side in (early, late)]
        rows.append(Growth("files of the run", pairs[0], pairs[1], "files"))
        pairs = [(median(s.shared_memory for s in side) / _MIB) for side in (early, late)]
        rows.append(Growth("/dev/shm", pairs[0], pairs[1], "MiB"))
        return rows


def kind_of(line: str) -> str:
    """Return the kind of a process, empty for one that does not belong to the parts of a run."""
    return next((kind for part, kind in _KINDS.items() if part in line), "")


def descriptor_targets(pid: int) -> Counter[str]:
    """Count the open files of a process by what they refer to, such as `socket`.

    Numbers and random parts of a name are removed, so that files of one kind count together.
    """
    targets = Counter[str]()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor).removesuffix(" (deleted)")
            name = target if target.startswith("/") else target.partition(":[")[0]
            targets[re.sub(r"[0-9a-f]{8,}|\d+", "N", name)] += 1
    return targets


def _growth_of_kind(kind: str, early: Sequence[Sample], late: Sequence[Sample]) -> list[Growth]:
    full = max(sample.counts[kind] for sample in (*early, *late))
    sides = [[s for s in side if s.counts[kind] == full] for side in (early, late)]
    if not all(sides):
        return []
    memory = [median(s.memory[kind] for s in side) / _MIB for side in sides]
    descriptors = [median(s.descriptors[kind] for s in side) for side in sides]
    name = f"{kind} x {full}"
    return [
        Growth(f"{name}, memory", memory[0], memory[1], "MiB"),
        Growth(f"{name}, descriptors", descriptors[0], descriptors[1], "descriptors"),
        *_growth_of_targets(kind, name, sides),
    ]


def _growth_of_targets(kind: str, name: str, sides: Sequence[Sequence[Sample]]) -> list[Growth]:
    """Return the kinds of open files that have become more."""
    all_targets = {target for side in sides for sample in side for target in sample.targets[kind]}
    rows = []
    for target in sorted(all_targets):
        before, after = (median(s.targets[kind][target] for s in side) for side in sides)
        if after > before:
            rows.append(Growth(f"{name}, of them {target}", before, after, "descriptors"))
    return rows


def _size(file: Path) -> int:
    """The size of a file, 0 if it does not exist any more."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
