"""Estimated pass rates of a data set's prompts, in a file beside it: a header, then a line for each
prompt.

{"data": {"source": "jsonl", "sha256": "..."}, "model": "...", "samples": 16, "temperature": 1.0,
...} {"id": "train:1", "right": 3, "samples": 16}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.wire_types import Count
from megatron_rl.prompts.question import PromptDataError

_FORMAT = 1
_REMEDY = "Write it anew with python launch/profile_prompts.py"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """data: which data set, as `identity_of` says; samples: asked of each prompt; date: ISO, of the
    beginning.
    """

    data: dict[str, Any]
    model: str
    samples: Count
    temperature: float
    max_new_tokens: Count
    reward: str
    date: str
    format: int = _FORMAT


class PassRate(msgspec.Struct, frozen=True, kw_only=True):
    """right of `samples` judged responses had correctness 1.

    samples may be fewer than were asked, or none.
    """

    id: str
    right: Count
    samples: Count

    def __post_init__(self) -> None:
        if self.right > self.samples:
            raise ValueError(f"right={self.right} of samples={self.samples}")

    def within(self, low: float, high: float) -> bool:
        """Whether the rate lies in a band; one without samples lies in none."""
        return self.samples > 0 and low <= self.right / self.samples <= high


def identity_of(settings: DataSettings) -> dict[str, Any]:
    """Which data set the settings name: a file by its contents, a source that writes questions by
    what it takes.

    How many of its questions are taken, and how many held out, makes it no other data set.
    """
    if settings.source == "jsonl":
        assert settings.train_path is not None, "the rules of the configuration ask for it"
        try:
            with open(settings.train_path, "rb") as file:
                return {
                    "source": "jsonl",
                    "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
                }
        except OSError as error:
            raise PromptDataError(
                f"data.train_path={settings.train_path}: it cannot be read ({error})"
            ) from error
    told: dict[str, Any] = {"source": settings.source, "seed": settings.seed}
    optional = {
        "task": settings.task,
        "task_config": settings.task_config,
        "options": settings.options,
    }
    return told | {name: value for name, value in optional.items() if value}


def read_pass_rates(path: str | Path, settings: DataSettings) -> dict[str, PassRate]:
    """Pass rates by prompt id: `right` of `samples`, which a belief can start from.

    Raises `PromptDataError` for a file that cannot be read, or that is of another data set than the
    settings name.
    """
    key = f"data.pass_rates={path}"
    header, rates = read_file(path)
    told, now = header.data, msgspec.to_builtins(identity_of(settings))
    if told != now:
        other = [
            f"{name}: {told.get(name)!r} there, {now.get(name)!r} here"
            for name in sorted(told | now)
            if told.get(name) != now.get(name)
        ]
        raise PromptDataError(
            f"{key}: it is of another data set ({'; '.join(other)}). {_REMEDY} for this one"
        )
    return {rate.id: rate for rate in rates}


def read_file(path: str | Path) -> tuple[Header, list[PassRate]]:
    """Raises `PromptDataError` naming the line."""
    key, rates, seen = f"data.pass_rates={path}", list[PassRate](), set[str]()
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise PromptDataError(f"{key}: it cannot be read ({error.strerror}). {_REMEDY}") from error
    header = _decoded(lines[0] if lines else b"", Header, f"{key} line 1")
    if header.format != _FORMAT:
        raise PromptDataError(
            f"{key}: it is of format {header.format}, and this version reads {_FORMAT}. {_REMEDY}"
        )
    for number, line in enumerate(lines[1:], 2):
        rate = _decoded(line, PassRate, f"{key} line {number}")
        if rate.id in seen:
            raise PromptDataError(
                f"{key} line {number}: prompt {rate.id[:80]!r} has a rate already. {_REMEDY}"
            )
        seen.add(rate.id)
        rates.append(rate)
    return header, rates


class PassRateFile:
    """Written beside its place as `NAME.part`, and moved there when it is whole: `finish`.

    What an earlier attempt with the same header (but for its date) left is kept: `done` has its
    prompts. Raises `PromptDataError` for one of another header.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        self.done: dict[str, PassRate] = {}
        if self._part.exists():
            self._take_over(header)
            return
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._part.write_bytes(msgspec.json.encode(header) + b"\n")

    def add(self, rates: Sequence[PassRate]) -> None:
        """Append, so that nothing of it is lost when the program ends here."""
        with self._part.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(rate) + b"\n" for rate in rates))
        self.done |= {rate.id: rate for rate in rates}

    def finish(self) -> None:
        self._part.rename(self._path)

    def _take_over(self, header: Header) -> None:
        whole = (
            self._part.read_bytes().rpartition(b"\n")[0] + b"\n"
        )  # a line that was cut off is asked again
        self._part.write_bytes(whole)
        before, rates = read_file(self._part)
        if msgspec.structs.replace(before, date=header.date) != header:
            different = [name for name, value in _differences(before, header)]
            raise PromptDataError(
                f"data.pass_rates={self._path}: {self._part} is what an attempt with other settings left "
                f"({', '.join(different)}). Remove it, or give another name"
            )
        self.done = {rate.id: rate for rate in rates}


def _differences(one: Header, other: Header) -> Iterator[tuple[str, Any]]:
    ones: Mapping[str, Any] = msgspec.structs.asdict(one)
    for name, value in msgspec.structs.asdict(other).items():
        if name != "date" and ones[name] != value:
            yield name, value


def _decoded(line: bytes, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PromptDataError(f"{where}: it is no such line ({error}). {_REMEDY}") from error
