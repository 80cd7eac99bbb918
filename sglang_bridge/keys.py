"""Random keys per run, so that no other user of a machine can use or change its engines."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import msgspec


class RunKeys(msgspec.Struct, frozen=True):
    """api_key: for generation. admin_api_key: for everything that changes an engine."""

    api_key: str
    admin_api_key: str

    def __repr__(self) -> str:
        return "RunKeys(api_key=***, admin_api_key=***)"


def create_keys() -> RunKeys:
    """Two fresh keys of 256 bits each."""
    return RunKeys(api_key=secrets.token_hex(32), admin_api_key=secrets.token_hex(32))


def write_keys(keys: RunKeys, path: Path) -> None:
    """Write `{"api_key": ..., "admin_api_key": ...}` readable by the owner alone; replaces an older file."""
    _write_private(path, msgspec.json.encode(keys))


def write_server_config(keys: RunKeys, path: Path) -> None:
    """Write the keys as a `--config` file for SGLang, which wants long option names and the suffix .yaml."""
    if path.suffix != ".yaml":
        raise ValueError(f"server config {path}: SGLang only reads files that end in .yaml")
    options = {"api-key": keys.api_key, "admin-api-key": keys.admin_api_key}
    _write_private(path, json.dumps(options).encode())


def read_keys(path: Path) -> RunKeys:
    """Read what `write_keys` wrote. Raises `PermissionError` where others may read it, `ValueError` if malformed."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(f"engine.key_file {path} has mode {mode:o}: others may read it; run chmod 600 {path}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunKeys)
    except msgspec.DecodeError as error:
        raise ValueError(
            f'engine.key_file {path}: {error}; expected {{"api_key": "...", "admin_api_key": "..."}}'
        ) from error


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
