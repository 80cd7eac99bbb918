"""The file starts.jsonl: when a run was started, from which step, and how each start ended.

A start learns how the one before it ended. That one may have been killed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from megatron_rl.records.durable_files import sync_folder, write_synced
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import RunUnreadable, iterate_metrics

_NAME = "starts.jsonl"


class End(msgspec.Struct, frozen=True):
    """The end of a start.

    step: the step that it was in. code: None when all its processes were killed at once.
    """

    step: int
    code: int | None
    reason: str


class Start(msgspec.Struct, frozen=True, omit_defaults=True):
    """One start of a run.

    time: in seconds since 1970. first_step: the first step that it trains. launch: identifies the
    torchrun that started its ranks. host: of rank 0, for people. end: None until the next start.
    """

    time: float
    first_step: int
    launch: str = ""
    host: str = ""
    end: End | None = None


_decoder = msgspec.json.Decoder(Start)


def read_starts(directory: Path) -> tuple[Start, ...]:
    """Read the starts of a run, the first one first.

    A damaged file counts as empty. A run of an earlier version, without this file, has had one
    start.
    """
    file = directory / _NAME
    try:
        return tuple(_decoder.decode(line) for line in file.read_bytes().splitlines())
    except FileNotFoundError:
        return _unrecorded_start(directory)
    except (OSError, msgspec.MsgspecError):
        return ()


def with_last_end(starts: tuple[Start, ...], directory: Path) -> tuple[Start, ...]:
    """Add how the last start ended.

    Call it while no process of the run is alive, before its records move.
    """
    if not starts or starts[-1].end is not None:
        return starts
    record = read_exit_record(directory)
    last = starts[-1]
    step = max(_last_recorded_step(directory) + 1, last.first_step)
    if record is None:
        end = End(step, None, "all its processes were killed")
    else:
        end = End(step, record.code, record.reason)
    return (*starts[:-1], msgspec.structs.replace(last, end=end))


def write_starts(directory: Path, starts: Sequence[Start]) -> None:
    """Replace the file at once, so that it is complete even after a power failure."""
    partial = directory / f"{_NAME}.partial"
    write_synced(partial, b"".join(msgspec.json.encode(start) + b"\n" for start in starts))
    os.replace(partial, directory / _NAME)
    sync_folder(directory)


def new_start(first_step: int, environment: Mapping[str, str]) -> Start:
    """Return the start of this process."""
    start_time = psutil.Process().create_time()
    return Start(start_time, first_step, launch_of(environment), socket.gethostname())


def launch_of(environment: Mapping[str, str]) -> str:
    """Identify the torchrun that has started this process. Its restarts have the same identity."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    parts = [environment.get(name, "") for name in names]
    # Rank 0 may move to another node when there are several
    if environment.get("WORLD_SIZE", "1") == environment.get("LOCAL_WORLD_SIZE", "1"):
        launcher = psutil.Process(os.getppid())
        parts += [socket.gethostname(), str(launcher.pid), str(launcher.create_time())]
    return "/".join(parts)


def _unrecorded_start(directory: Path) -> tuple[Start, ...]:
    """Return the start of a run that has no record of it, as old as its directory."""
    try:
        return (Start((directory / "versions.json").stat().st_mtime, 1),)
    except OSError:
        return ()


def _last_recorded_step(directory: Path) -> int:
    try:
        return max((round(r["step"] or 0) for r in iterate_metrics(directory)), default=0)
    except (RunUnreadable, KeyError):
        return 0
