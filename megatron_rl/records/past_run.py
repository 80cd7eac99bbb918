"""Reads the directory of a run: its metrics, its settings and its number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from megatron_rl.contracts.exit_codes import ExitCode, Failure

Record = dict[str, float | None]


class _Versions(msgspec.Struct):
    ranks: int | None = None


_record_decoder = msgspec.json.Decoder(Record)


class RunUnreadable(Failure):
    """A directory holds no run, or its files are damaged."""

    exit_code = ExitCode.REFUSED


def read_metrics(directory: Path) -> list[Record]:
    """Read the records of metrics.jsonl, as `iterate_metrics` does."""
    return list(iterate_metrics(directory))


def iterate_metrics(directory: Path) -> Iterator[Record]:
    """Yield the records of metrics.jsonl. None stands for a non-finite number.

    An incomplete last line is ignored: the run is writing it, or was killed while it did. Raises
    `RunUnreadable`.
    """
    file = directory / "metrics.jsonl"
    with _explained_read_errors(file), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield _decode_record(line, file, number)


def _decode_record(line: bytes, file: Path, number: int) -> Record:
    try:
        return _record_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunUnreadable(
            f"{file} line {number} is damaged ({error}): a record is one JSON object of "
            "numbers. Remove that line, or run again"
        ) from error


def read_settings(directory: Path) -> dict[str, Any]:
    """Read config.yaml as {"section.key": value}. Raises `RunUnreadable`."""
    file = directory / "config.yaml"
    try:
        return flat_settings(_read(file).decode())
    except RunUnreadable:
        raise
    except Exception as error:
        # PyYAML and OmegaConf raise errors of their own, without a common base
        raise RunUnreadable(
            f"{file} is damaged ({_first_line(error)}). Move the run away, or run again"
        ) from error


def read_ranks(directory: Path) -> int | None:
    """Read the number of ranks of a run; None for a run that did not record it.

    Raises `RunUnreadable`.
    """
    file = directory / "versions.json"
    try:
        return msgspec.json.decode(_read(file), type=_Versions).ranks
    except msgspec.DecodeError as error:
        raise RunUnreadable(
            f"{file} is damaged ({error}). Move the run away, or run again"
        ) from error


def flat_settings(text: str) -> dict[str, Any]:
    """Parse settings in YAML as {"section.key": value}.

    Raises ValueError for text that holds no settings.
    """
    tree = OmegaConf.to_container(OmegaConf.create(text))
    if not isinstance(tree, dict) or not tree:
        raise ValueError("it holds no settings")
    return dict(_leaves(tree, ""))


def _leaves(tree: dict[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            leaves += _leaves(value, f"{key}.")
        else:
            leaves.append((key, value))
    return leaves


def _read(file: Path) -> bytes:
    with _explained_read_errors(file):
        return file.read_bytes()


@contextlib.contextmanager
def _explained_read_errors(file: Path) -> Iterator[None]:
    """Raise `RunUnreadable` for a file of a run that cannot be read."""
    directory = file.parent
    if not directory.is_dir():
        raise RunUnreadable(
            f"{directory}: there is no such directory. Give a run's directory, such as runs/NAME"
        )
    try:
        yield
    except FileNotFoundError:
        if (directory / "versions.json").exists():
            reason = "the run ended before it wrote one"
        else:
            reason = "it is not the directory of a run"
        raise RunUnreadable(f"{directory} holds no {file.name}: {reason}") from None
    except OSError as error:
        raise RunUnreadable(f"{file} cannot be read: {error.strerror}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
