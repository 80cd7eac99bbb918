"""Random keys per run, so that no other user of a machine can use or change its engines."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import msgspec

from sglang_bridge.refusal import Refusal

_KEY_FILE_REMEDY = 'Write {"api_key": ..., "admin_api_key": ...} to a file with mode 0600'


class RunKeys(msgspec.Struct, frozen=True):
    """api_key: for generation. admin_api_key: for everything that changes an engine."""

    api_key: str
    admin_api_key: str

    def __repr__(self) -> str:
        return "RunKeys(api_key=***, admin_api_key=***)"


def create_keys() -> RunKeys:
    """Create two random keys of 256 bits each."""
    return RunKeys(api_key=secrets.token_hex(32), admin_api_key=secrets.token_hex(32))


def write_server_config(keys: RunKeys, path: Path) -> None:
    """Write the keys as a `--config` file for SGLang.

    SGLang requires long option names and the suffix .yaml. Raises `ValueError` for another suffix.
    """
    if path.suffix != ".yaml":
        raise ValueError(f"server config {path}: SGLang only reads files that end in .yaml")
    options = {"api-key": keys.api_key, "admin-api-key": keys.admin_api_key}
    _write_private(path, json.dumps(options).encode())


def read_keys(path: Path) -> RunKeys:
    """Read `{"api_key": ..., "admin_api_key": ...}`.

    Raises `ValueError` if `key_file_refusal` refuses the file.
    """
    refusal = key_file_refusal(path)
    if refusal is not None:
        raise ValueError(str(refusal))
    return msgspec.json.decode(path.read_bytes(), type=RunKeys)


def key_file_refusal(path: Path) -> Refusal | None:
    """Check that keys can be read from this file; None if they can. The text shows no key."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _refuse(path, "There is no such file")
    except OSError as error:
        return _refuse(path, f"It cannot be read ({error.strerror})")
    if not stat.S_ISREG(mode):
        return _refuse(path, "It is not a regular file")
    if stat.S_IMODE(mode) & 0o077:
        return _refuse(path, "Others can read the keys", f"chmod 600 {path}")
    try:
        msgspec.json.decode(path.read_bytes(), type=RunKeys)
    except (ValueError, OSError):
        return _refuse(path, "It does not hold two keys as JSON")
    return None


def _refuse(path: Path, rule: str, remedy: str = _KEY_FILE_REMEDY) -> Refusal:
    return Refusal("engine.key_file", str(path), rule, remedy)


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
