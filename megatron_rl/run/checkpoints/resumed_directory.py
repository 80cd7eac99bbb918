"""The directory of a run that goes on: what it wrote after its checkpoint is kept aside, and
nothing stands twice.
"""

from __future__ import annotations

import datetime
import os
import shutil
import time
from pathlib import Path
from typing import IO

import msgspec

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.records.durable_files import write_synced
from megatron_rl.records.exit_record import read_exit_record, reserve_exit_record
from megatron_rl.records.run_directory import (
    STOP_FILE,
    RunDirectory,
    RunDirectoryTaken,
    run_directory_path,
    to_yaml,
)
from megatron_rl.records.run_lock import claim_run
from megatron_rl.run.stopping import ended_by

_PATIENCE_SECONDS = 30.0
_ASIDE = "resumed"  # one folder in it for each time a run went on
_MOVED = ("exit.json", "left_out.txt", STOP_FILE)


class _Step(msgspec.Struct):
    step: int


def claim_directory(configuration: Configuration) -> IO[bytes] | None:
    """Wait until no process of the run to go on with lives, and mark it as this one's; None where
    there is no run.

    Whoever dies may still save and prune: look for its checkpoints after this. One that was killed
    a moment ago takes seconds to end. Rank 0 only. Raises `RunDirectoryTaken`.
    """
    path = run_directory_path(configuration.run, datetime.datetime.now())
    if not path.exists():
        return None
    if not all((path / name).is_file() for name in ("config.yaml", "versions.json")):
        raise _taken(path, "it is not the directory of a run; choose another run.name")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (lock := claim_run(path)) is None:
        if time.monotonic() > deadline:
            raise _taken(path, "a process of its run is still alive; end it first")
        time.sleep(0.5)
    return lock


def reopen_directory(configuration: Configuration, after: LoopState | None) -> RunDirectory:
    """Go on in a claimed run's directory behind a position, None: from the beginning. Rank 0 only.

    RunRecords of later steps, exit.json and a changed config.yaml move to `resumed/N/`. Raises
    `RunDirectoryTaken`.
    """
    path = run_directory_path(configuration.run, datetime.datetime.now())
    step = after.step if after is not None else None
    if after is not None:
        _require_unfinished(
            path, ended_by(after.step, after.accuracies, configuration.train, configuration.eval)
        )
    folder = _next_folder(path / _ASIDE)
    truncate_metrics(path / "metrics.jsonl", folder / "metrics.jsonl", step)
    for name in _MOVED:
        if (path / name).exists():
            (path / name).rename(folder / name)
    if step is None and (path / "tensorboard").exists():
        (path / "tensorboard").rename(folder / "tensorboard")
    settings = to_yaml(configuration)
    if (path / "config.yaml").read_text() != settings:
        shutil.copyfile(path / "config.yaml", folder / "config.yaml")
        write_synced(partial := path / "config.yaml.partial", settings.encode())
        os.replace(partial, path / "config.yaml")
    if not any(folder.iterdir()):
        folder.rmdir()
    for name in ("logs", "rollouts", "checkpoints"):
        (path / name).mkdir(exist_ok=True)
    reserve_exit_record(path)
    return RunDirectory(path)


def truncate_metrics(file: Path, aside: Path, step: int | None) -> None:
    """Keep the records up to `step`; later ones, and half a line at the end, go to a file of their
    own.
    """
    if not file.exists():
        return
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            whole = (
                line.endswith(b"\n")
                and step is not None
                and msgspec.json.decode(line, type=_Step).step <= step
            )
        except msgspec.MsgspecError:
            whole = False
        (kept if whole else cut).append(line)
    if not cut:
        return
    write_synced(aside, b"".join(cut))
    write_synced(partial := file.with_name(file.name + ".partial"), b"".join(kept))
    os.replace(partial, file)


def _require_unfinished(path: Path, key: str) -> None:
    """key: what leaves the run nothing to train. One that was killed before its very end has an end
    to make.
    """
    ended = read_exit_record(path)
    if key and ended is not None and ended.code == ExitCode.OK:
        raise _taken(path, f"its run is complete; raise {key} to train it further")


def _taken(path: Path, why: str) -> RunDirectoryTaken:
    return RunDirectoryTaken(f"run.resume=auto: {path} cannot be gone on with: {why}")


def _next_folder(parent: Path) -> Path:
    number = 1 + max(
        (int(old.name) for old in parent.glob("[0-9]*") if old.name.isdigit()), default=0
    )
    folder = parent / f"{number:03d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
