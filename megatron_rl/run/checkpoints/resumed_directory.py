"""Claims and reopens the directory of a run that resumes.

Everything that the run wrote after its checkpoint moves to a folder of its own, so that no step is
recorded twice.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import IO

import msgspec

from megatron_rl.config.schema import EvalSettings, TrainSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.records.durable_files import write_synced
from megatron_rl.records.exit_record import read_exit_record, reserve_exit_record
from megatron_rl.records.past_run import RunUnreadable, read_metrics
from megatron_rl.records.run_directory import ARCHIVE, STOP_FILE, RunDirectory, is_run_directory
from megatron_rl.records.run_lock import claim_run
from megatron_rl.records.samples.files import move_samples
from megatron_rl.run.end_conditions import ending_key

_PATIENCE_SECONDS = 30.0
_EXIT_RECORD = "exit.json"
_FILES_TO_ARCHIVE = (_EXIT_RECORD, "left_out.txt", STOP_FILE)


class _Step(msgspec.Struct):
    step: int


def claim_directory(path: Path, *, patience_seconds: float = _PATIENCE_SECONDS) -> IO[bytes] | None:
    """Wait until no process of the run is alive, and mark the run as alive. Rank 0 only.

    Look for its checkpoints after this: a dying process may still save one and remove others.
    Returns the open lock file; None when there is no run to resume. Raises `Failure`
    when a process is still alive after `patience_seconds`.
    """
    if not path.exists():
        return None
    if not is_run_directory(path):
        raise _cannot_resume(path, "it is not the directory of a run. Choose another run.name")
    deadline = time.monotonic() + patience_seconds
    lock = claim_run(path)
    while lock is None:
        if time.monotonic() > deadline:
            raise _cannot_resume(path, "a process of its run is still alive. End it first")
        time.sleep(0.5)
        lock = claim_run(path)
    return lock


def is_complete(
    path: Path, position: LoopState, train: TrainSettings, evaluation: EvalSettings
) -> bool:
    """True for a run that ended well and whose settings leave nothing to train after `position`.

    A run that was killed just before its end is not complete, so that it can end.
    """
    accuracies = position.accuracies
    if position.unevaluated_metrics is not None:
        accuracies += _recorded_accuracies(path, position.step)
    key = ending_key(position.step, accuracies, train, evaluation)
    exit_record = read_exit_record(path)
    return bool(key) and exit_record is not None and exit_record.code == ExitCode.OK


def _recorded_accuracies(path: Path, step: int) -> tuple[float, ...]:
    """Return the accuracy of a step whose evaluation was made up for after its checkpoint."""
    try:
        records = read_metrics(path)
    except RunUnreadable:
        return ()
    accuracies = [record.get("eval/accuracy") for record in records if record["step"] == step]
    return tuple(accuracy for accuracy in accuracies[-1:] if accuracy is not None)


def reopen_directory(directory: RunDirectory, settings: str, position: LoopState | None) -> None:
    """Prepare the claimed directory of a run that resumes. Rank 0 only.

    settings: the new config.yaml. position: the state to resume from, None to start from the
    beginning. Records and samples of later steps, exit.json and a changed config.yaml move to
    `resumed/N/`.
    """
    path = directory.path
    step = None
    if position is not None:
        step = position.step
        if position.unevaluated_metrics is not None:
            step -= 1  # the resumed run evaluates this step, and writes its record again
    archive = _next_folder(path / ARCHIVE)
    truncate_metrics(directory.metrics_file, archive / "metrics.jsonl", step)
    move_samples(path, archive, after_step=0 if position is None else position.step)
    for name in _FILES_TO_ARCHIVE:
        _move(path / name, archive)
    if step is None:
        _move(directory.tensorboard, archive)
    _replace_settings(path / "config.yaml", settings, archive)
    if not any(archive.iterdir()):
        archive.rmdir()
    directory.make_folders()
    reserve_exit_record(path)


def archive_exit_record(path: Path) -> None:
    """Move exit.json to `resumed/N/`, so that this start can record its end. Rank 0 only."""
    if (path / _EXIT_RECORD).exists():
        _move(path / _EXIT_RECORD, _next_folder(path / ARCHIVE))
    reserve_exit_record(path)


def truncate_metrics(file: Path, archive_file: Path, step: int | None) -> None:
    """Move the records after `step`, and an incomplete last line, to `archive_file`.

    step: None moves all records.
    """
    if not file.exists():
        return
    kept_lines: list[bytes] = []
    moved_lines: list[bytes] = []
    for line in file.read_bytes().splitlines(keepends=True):
        lines = kept_lines if _is_until(line, step) else moved_lines
        lines.append(line)
    if not moved_lines:
        return
    write_synced(archive_file, b"".join(moved_lines))
    _replace(file, b"".join(kept_lines))


def _is_until(line: bytes, step: int | None) -> bool:
    """True for a complete record of `step` or an earlier step."""
    if step is None or not line.endswith(b"\n"):
        return False
    try:
        return msgspec.json.decode(line, type=_Step).step <= step
    except msgspec.MsgspecError:
        return False


def _replace_settings(file: Path, settings: str, archive: Path) -> None:
    """Replace config.yaml when the settings have changed, and keep a copy of the old one."""
    if file.read_text() != settings:
        shutil.copyfile(file, archive / file.name)
        _replace(file, settings.encode())


def _replace(file: Path, data: bytes) -> None:
    """Replace a file at once, so that it is complete even after a power failure."""
    partial = file.with_name(file.name + ".partial")
    write_synced(partial, data)
    os.replace(partial, file)


def _move(file: Path, folder: Path) -> None:
    if file.exists():
        file.rename(folder / file.name)


def _cannot_resume(path: Path, reason: str) -> Failure:
    return Failure(f"run.resume=auto: {path} cannot be resumed: {reason}", ExitCode.REFUSED)


def _next_folder(parent: Path) -> Path:
    """Make the next numbered folder."""
    numbers = [int(old.name) for old in parent.glob("[0-9]*") if old.name.isdigit()]
    folder = parent / f"{1 + max(numbers, default=0):03d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
