"""One of two ranks that send weights to engines, and may die at a phase of an update.

`tests/support/sync_ranks.py` starts it. Weights of a version are filled with numbers that depend on
it. Rank 0 prints `DONE` once all versions were sent. A rank that is told to die kills itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.engines.rank_part import GroupCrew
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import WeightUpdateFailed
from sglang_bridge.keys import RunKeys
from sglang_bridge.weights import weight_group
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.source import SoleSource
from sglang_bridge.weights.updater import WeightUpdater

# After so many parts of a rank's tensors. Each part fills buckets of its own
_PARTS = 3
BUCKETS = tuple(f"bucket {part}" for part in range(1, _PARTS + 1))
# forming: an engine waits for its group. broadcast: it waits for a bucket.
PHASES = (
    "pause",
    "forming",
    "formed",
    "begin",
    *BUCKETS,
    "broadcast",
    "end",
    "flush",
    "audit",
)
# Rank 0 alone goes through the others
PHASES_OF_ALL = ("forming", "formed", *BUCKETS, "broadcast")
_GAP_SECONDS = 0.3
TIMEOUT_SECONDS = 20
NAMES = [f"w{index}" for index in range(8)]


def version_of_death(phase: str) -> int:
    """The update in which somebody dies: groups are formed in the first one."""
    return 1 if phase == "forming" else 2


class Job(msgspec.Struct):
    """The work of the ranks.

    urls: of the engines. versions: that are sent. rank, version, phase: who dies when, if anybody.
    pid: the process that dies instead of the rank. weights: a file with the tensors; None for small
    ones. dtype: of those in the file.
    """

    port: int
    urls: list[str]
    versions: list[int]
    keys: RunKeys
    rank: int = -1
    version: int = -1
    phase: str = ""
    pid: int = 0
    weights: str | None = None
    dtype: str = "float32"


def tensors_of(job: Job, version: int, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of a rank: every second one."""
    if job.weights is None:
        whole = {
            name: torch.full((256,), 100.0 * version + index) for index, name in enumerate(NAMES)
        }
    else:
        whole = weights_of(Path(job.weights), version, job.dtype)
    layers = sorted({name.split(".layers.")[-1].split(".")[0] for name in whole})
    return {
        name: tensor
        for name, tensor in whole.items()
        if layers.index(name.split(".layers.")[-1].split(".")[0]) % 2 == rank
    }


def weights_of(file: Path, version: int, dtype: str) -> dict[str, torch.Tensor]:
    """The weights of a version: from a file, at another scale."""
    from safetensors.torch import load_file

    from tests.support.updaters import in_units

    weights = in_units(load_file(file))
    scale = 1 + version / 16
    return {name: (scale * tensor).to(getattr(torch, dtype)) for name, tensor in weights.items()}


class Fate:
    """Kills this rank, or another process, at a phase of one update."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank
        self.version = -1
        self._lock = threading.Lock()

    def at(self, phase: str) -> None:
        job = self._job
        with self._lock:  # engines are called in threads
            if (self._rank, self.version, phase) != (job.rank, job.version, job.phase):
                return
            job.phase = ""
        print(f"DEATH {time.time()}", flush=True)
        os.kill(job.pid or os.getpid(), signal.SIGKILL)
        time.sleep(0.2)  # of a process that is not this one

    def is_near(self, phase: str) -> bool:
        """True if it comes at this phase of the present update."""
        job = self._job
        return (self._rank, self.version, phase) == (job.rank, job.version, job.phase)

    def come(self, phase: str) -> None:
        """Come to a phase once earlier buckets and requests are with the engines."""
        if self.is_near(phase):
            time.sleep(_GAP_SECONDS)
            self.at(phase)

    def before(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.come(phase)
            return function(*args, **kwargs)

        return call

    def after(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.at(phase)
            return result

        return call


class MortalTransport(DistributedTransport):
    """Meets its fate between the buckets of an update."""

    fate: Fate

    def connect(self, admins: Sequence[AdminClient]) -> dict[str, str]:
        return dict(self.fate.after("formed", super().connect)(admins))

    def begin(self, admins: Sequence[AdminClient], version: int, deadline: float) -> dict[str, str]:
        return dict(self.fate.after("begin", super().begin)(admins, version, deadline))

    def end(self, admins: Sequence[AdminClient], version: int, deadline: float) -> dict[str, str]:
        return dict(self.fate.after("end", super().end)(admins, version, deadline))


class MortalBroadcasts:
    """torch.distributed for groups with engines. It meets its fate before a broadcast."""

    def __init__(self, fate: Fate) -> None:
        self.broadcast = fate.before("broadcast", dist.broadcast)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def stream(job: Job, version: int, rank: int, fate: Fate) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = list(tensors_of(job, version, rank).items())
    ends = {len(tensors) * part // _PARTS: part for part in range(1, _PARTS + 1)}
    for count, item in enumerate(tensors, start=1):
        yield item
        if count in ends:
            fate.come(f"bucket {ends[count]}")


def main(job: Job, rank: int) -> None:
    """Send every version, as far as it goes."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{job.port}", rank=rank, world_size=2
    )
    if rank == 0:
        print(f"READY {time.time()}", flush=True)
    fate = Fate(job, rank)
    weight_group.join_as_source = fate.before("forming", weight_group.join_as_source)
    weight_group.dist = MortalBroadcasts(fate)  # type: ignore[assignment]
    part = open_part(job, rank, fate)
    if rank == 0:
        lead(job, part, fate)
        print("DONE", flush=True)
    else:
        for version in job.versions:
            fate.version = version
            part.follow(source_of(job, version, rank, fate))
    part.close()


def open_part(job: Job, rank: int, fate: Fate) -> RankPart:
    """Open this rank's part, over a transport that meets its fate."""
    transport = MortalTransport(backend="gloo", timeout_seconds=TIMEOUT_SECONDS)
    transport.fate = fate
    return RankPart(
        transport,
        GroupCrew(rank, dist.new_group(backend="gloo")),
        bucket_bytes=1024 if job.weights is None else 256 * 1024,
        open_admin=lambda engine: AdminClient(engine, job.keys, timeout=TIMEOUT_SECONDS),
    )


def source_of(job: Job, version: int, rank: int, fate: Fate) -> SoleSource:
    """Return what this rank sends."""
    return SoleSource(lambda: stream(job, version, rank, fate))


def lead(job: Job, part: RankPart, fate: Fate) -> None:
    """Send every version from rank 0, without engines that failed."""
    admins = [AdminClient(Engine(url=url), job.keys, timeout=TIMEOUT_SECONDS) for url in job.urls]
    for admin in admins:
        admin.pause = fate.after("pause", admin.pause)  # type: ignore[method-assign]
        admin.flush_cache = fate.after("flush", admin.flush_cache)  # type: ignore[method-assign]
    updater = WeightUpdater(part)
    for version in job.versions:
        fate.version = version
        try:
            updater.push(source_of(job, version, 0, fate), version, admins)
        except WeightUpdateFailed as error:
            print(f"FAILED {json.dumps(error.failures)}", flush=True)
            admins = [admin for admin in admins if admin.url not in error.failures]
        fate.at("audit")
        print(f"SENT {version} {time.time()}", flush=True)


def run(data: bytes, rank: int, output: Path) -> None:
    """Be a rank of a job, whose lines go to a file. data: the job as JSON."""
    with output.open("w") as file, contextlib.redirect_stdout(file):
        main(msgspec.json.decode(data, type=Job), rank)
