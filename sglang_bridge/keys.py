"""Random keys per run, so that no other user of a machine can use or change its engines."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import msgspec

from sglang_bridge.refusal import Refusal


class RunKeys(msgspec.Struct, frozen=True):
    """api_key: for generation. admin_api_key: for everything that changes an engine."""

    api_key: str
    admin_api_key: str

    def __repr__(self) -> str:
        return "RunKeys(api_key=***, admin_api_key=***)"


def create_keys() -> RunKeys:
    """Two fresh keys of 256 bits each."""
    return RunKeys(api_key=secrets.token_hex(32), admin_api_key=secrets.token_hex(32))


def write_server_config(keys: RunKeys, path: Path) -> None:
    """Write the keys as a `--config` file for SGLang, which wants long option names and the suffix
    .yaml.
    """
    if path.suffix != ".yaml":
        raise ValueError(f"server config {path}: SGLang only reads files that end in .yaml")
    options = {"api-key": keys.api_key, "admin-api-key": keys.admin_api_key}
    _write_private(path, json.dumps(options).encode())


def read_keys(path: Path) -> RunKeys:
    """Read `{"api_key": ..., "admin_api_key": ...}`. Raises `ValueError` where `key_file_refusal`
    finds one.
    """
    if problem := key_file_refusal(path):
        raise ValueError(str(problem))
    return msgspec.json.decode(path.read_bytes(), type=RunKeys)


def key_file_refusal(path: Path) -> Refusal | None:
    """Why keys cannot be read from this file, None where they can. Its text shows no key."""
    remedy = 'Write {"api_key": ..., "admin_api_key": ...} to a file with mode 0600'
    try:
        mode = path.stat().st_mode
    except OSError as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        rule = "There is no such file" if gone else f"It cannot be looked at ({error.strerror})"
        return Refusal("engine.key_file", str(path), rule, remedy)
    if not stat.S_ISREG(mode):
        return Refusal(
            "engine.key_file", str(path), "There is no such file: it is something else", remedy
        )
    if stat.S_IMODE(mode) & 0o077:
        return Refusal(
            "engine.key_file", str(path), "Others can read the keys", f"chmod 600 {path}"
        )
    try:
        msgspec.json.decode(path.read_bytes(), type=RunKeys)
    except (ValueError, OSError):
        return Refusal("engine.key_file", str(path), "It does not hold two keys as JSON", remedy)
    return None


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
