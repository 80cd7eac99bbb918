"""exit.json: how a run ended, whole or absent. The first process to say it is right."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from pathlib import Path

import msgspec

_NAME, _RESERVE = "exit.json", ".exit-reserve"
_RESERVED_BYTES = 64 * 1024
_MOST_REASON_BYTES = (
    _RESERVED_BYTES // 2
)  # JSON escapes newlines and quotes with one byte more each


class ExitRecord(msgspec.Struct, frozen=True):
    """code: 0 for a complete run. ended: UTC."""

    code: int
    reason: str
    ended: str


def reserve_exit_record(directory: Path) -> None:
    """Take the space of an exit record now, so that a disk that fills up later has room for it."""
    (directory / _RESERVE).write_bytes(bytes(_RESERVED_BYTES))


def write_exit_record(directory: Path, code: int, reason: str) -> bool:
    """Leave code and reason; False where a record is there already, which stays. Raises `OSError`."""
    ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    reason = reason.encode(errors="replace")[:_MOST_REASON_BYTES].decode(errors="ignore")
    own = directory / f"{_NAME}.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):  # another rank took it
        (directory / _RESERVE).rename(own)
    try:
        _write(own, msgspec.json.encode(ExitRecord(code, reason, ended)) + b"\n")
        return _publish(own, directory / _NAME)
    finally:
        own.unlink(missing_ok=True)


def read_exit_record(directory: Path) -> ExitRecord | None:
    """How the run of a directory ended; None while it goes on, or when all of its processes were
    killed at once.
    """
    try:
        return msgspec.json.decode((directory / _NAME).read_bytes(), type=ExitRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _write(file: Path, data: bytes) -> None:
    """Write over what is there, whose blocks exist, and reach the disk."""
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
    """Give a whole file its name, unless the name is taken."""
    try:
        os.link(file, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if target.exists():
            return False
        file.rename(target)
    with contextlib.suppress(OSError):
        descriptor = os.open(target.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return True
