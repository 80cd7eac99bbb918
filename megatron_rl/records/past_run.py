"""A run's directory, read back: its metrics and its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from megatron_rl.contracts.exit_codes import ExitCode, Failure

Record = dict[str, float | None]


class _Versions(msgspec.Struct):
    ranks: int | None = None


_records = msgspec.json.Decoder(Record)


class RunUnreadable(Failure):
    """A directory that is not a run's, or whose files are damaged."""

    exit_code = ExitCode.REFUSED


def read_metrics(directory: Path) -> list[Record]:
    """The records of `metrics.jsonl`; null stands for a number that is not finite. Raises
    `RunUnreadable`.

    A last line without its end is left out: the run is writing it, or was killed meanwhile.
    """
    file = directory / "metrics.jsonl"
    *lines, _ = _bytes(file).split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_records.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RunUnreadable(
                f"{file} line {number} is damaged ({error}): a record is one JSON object of numbers. Remove that line, "
                "or run again"
            ) from error
    return records


def read_settings(directory: Path) -> dict[str, Any]:
    """`config.yaml` as {"section.key": value}. Raises `RunUnreadable`."""
    file = directory / "config.yaml"
    try:
        return flat_settings(_bytes(file).decode())
    except RunUnreadable:
        raise
    except Exception as error:  # PyYAML's, OmegaConf's and plain ValueErrors
        raise RunUnreadable(
            f"{file} is damaged ({_first_line(error)}). Move the run away, or run again"
        ) from error


def read_ranks(directory: Path) -> int | None:
    """How many ranks it ran on; None for a run that did not note it. Raises `RunUnreadable`."""
    file = directory / "versions.json"
    try:
        return msgspec.json.decode(_bytes(file), type=_Versions).ranks
    except msgspec.DecodeError as error:
        raise RunUnreadable(
            f"{file} is damaged ({error}). Move the run away, or run again"
        ) from error


def flat_settings(text: str) -> dict[str, Any]:
    """Settings in YAML as {"section.key": value}. Raises ValueError for text that holds no
    settings.
    """
    tree = OmegaConf.to_container(OmegaConf.create(text))
    if not isinstance(tree, dict) or not tree:
        raise ValueError("it holds no settings")
    return dict(_leaves(tree, ""))


def _leaves(tree: dict[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found += _leaves(value, f"{key}.") if isinstance(value, dict) and value else [(key, value)]
    return found


def _bytes(file: Path) -> bytes:
    if not file.parent.is_dir():
        raise RunUnreadable(
            f"{file.parent}: there is no such directory. Give a run's, such as runs/NAME"
        )
    try:
        return file.read_bytes()
    except FileNotFoundError:
        held = (
            "no run"
            if not (file.parent / "versions.json").exists()
            else "a run that ended before it wrote one"
        )
        raise RunUnreadable(
            f"{file.parent} holds no {file.name}: it is the directory of {held}"
        ) from None
    except OSError as error:
        raise RunUnreadable(f"{file} cannot be read: {error.strerror}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
