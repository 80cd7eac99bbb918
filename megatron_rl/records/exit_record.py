"""The file exit.json: the exit code of a run and its reason.

The file is complete or missing. The first process that writes it decides its content.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from pathlib import Path

import msgspec

_NAME = "exit.json"
_RESERVE_NAME = ".exit-reserve"
_RESERVE_BYTES = 64 * 1024
# JSON escapes a newline or a quote with one more byte, so half of the reserve always suffices
_MAX_REASON_BYTES = _RESERVE_BYTES // 2


class ExitRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of exit.json.

    code: the exit code, 0 for a complete run. reason: for people. end_time: in UTC, written as
    `ended`. log_tail: the last lines of the log of the process that failed; absent if empty.
    """

    code: int
    reason: str
    end_time: str = msgspec.field(name="ended")
    log_tail: str = ""


def reserve_exit_record(directory: Path) -> None:
    """Allocate the disk space of an exit record, in case the disk is full when the run ends."""
    (directory / _RESERVE_NAME).write_bytes(bytes(_RESERVE_BYTES))


def write_exit_record(directory: Path, code: int, reason: str, log_tail: str = "") -> bool:
    """Write the exit record unless there is one. Returns False when there is one already.

    Raises `OSError` when it cannot be written.
    """
    end_time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    reason = reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
    record = ExitRecord(code, reason, end_time)
    partial = directory / f"{_NAME}.{secrets.token_hex(4)}"
    # Another rank may have used the reserve already
    with contextlib.suppress(OSError):
        (directory / _RESERVE_NAME).rename(partial)
    try:
        _overwrite(partial, _encode(record, log_tail.encode(errors="replace").decode()))
        return _publish(partial, directory / _NAME)
    finally:
        partial.unlink(missing_ok=True)


def read_exit_record(directory: Path) -> ExitRecord | None:
    """Read the exit record of a run.

    Returns None while the run is still going, and when all its processes were killed at once.
    """
    try:
        return msgspec.json.decode((directory / _NAME).read_bytes(), type=ExitRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _encode(record: ExitRecord, log_tail: str) -> bytes:
    """Encode a record with as much of the end of the log as fits into the reserve."""
    while True:
        data = msgspec.json.encode(msgspec.structs.replace(record, log_tail=log_tail)) + b"\n"
        if len(data) <= _RESERVE_BYTES or not log_tail:
            return data
        log_tail = log_tail[len(log_tail) // 2 + 1 :]


def _overwrite(file: Path, data: bytes) -> None:
    """Write into the allocated blocks of a file and flush it to the disk."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(file: Path, target: Path) -> bool:
    """Give a complete file its final name. Returns False when the name is taken."""
    try:
        os.link(file, target)
    except FileExistsError:
        return False
    except OSError:
        # The file system has no hard links
        if target.exists():
            return False
        file.rename(target)
    with contextlib.suppress(OSError):
        descriptor = os.open(target.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return True
