"""Estimated pass rates of a data set's prompts, in a JSONL file.

The first line is a header. Each further line is the rate of one prompt:

    {"data": {"source": "jsonl", "sha256": "..."}, "model": "...", "reward": {...}, ...}
    {"id": "train:1", "correct": 3, "samples": 16, "mean_tokens": 812.5}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megatron_rl.config.schema import DataSettings, EnvironmentSettings, RewardSettings
from megatron_rl.contracts.wire_types import Count
from megatron_rl.prompts.files.reader import FILE_SOURCES, digest_of
from megatron_rl.prompts.locations import settings_of_source, training_data
from megatron_rl.prompts.question import PromptDataError

_FORMAT = 2
_REMEDY = "Write the file again with python launch/profile_prompts.py"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a file of pass rates.

    data: identity of the data set, see `identity_of`.
    samples: number of responses sampled for each prompt.
    temperature, max_new_tokens, top_p: of their sampling. A file without top_p does not say it.
    reward, environment: settings that decide which responses are correct, see `judge_of`.
    date: ISO date of the start.
    """

    data: dict[str, Any]
    model: str
    samples: Count
    temperature: float
    max_new_tokens: Count
    top_p: float | None = None
    reward: dict[str, Any]
    environment: dict[str, Any]
    date: str
    format: int = _FORMAT


class PassRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pass rate of one prompt: `correct` of `samples` judged responses have correctness 1.

    `samples` is less than the number of sampled responses if some have no verdict. It may be 0.
    mean_tokens: of the responses. None: the file does not say it, or there is no response.
    """

    id: str
    correct: Count
    samples: Count
    mean_tokens: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None

    def __post_init__(self) -> None:
        if self.correct > self.samples:
            raise ValueError(f"correct={self.correct} must not exceed samples={self.samples}")

    def within(self, low: float, high: float) -> bool:
        """Return True if the rate lies in [low, high]. A prompt without samples has no rate."""
        return self.samples > 0 and low <= self.correct / self.samples <= high


def identity_of(settings: DataSettings) -> dict[str, Any]:
    """Return the identity of the data set that the settings name.

    A file is identified by its contents, a source that generates questions by its settings. The
    numbers of training and held-out questions and the weights of a mixture are not part of it.

    Raises `PromptDataError` if a file cannot be read.
    """
    if settings.source == "mixture":
        identities = {
            name: identity_of(settings_of_source(settings, name)) for name in settings.sources
        }
        return {"source": "mixture", "sources": identities}
    if settings.source in FILE_SOURCES:
        file = {"source": settings.source, "sha256": digest_of(training_data(settings))}
        return file | ({"columns": dict(settings.columns)} if settings.columns else {})
    identity: dict[str, Any] = {"source": settings.source, "seed": settings.seed}
    return identity | ({"options": settings.options} if settings.options else {})


def judge_of(settings: RewardSettings | EnvironmentSettings) -> dict[str, Any]:
    """Return the settings that decide a response's correctness, as JSON would return them.

    Timeouts and the number of processes are not part of it. Neither are the parts of a reward that
    has none: files that were measured before there were any do not differ.
    """
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    for key in ("timeout_s", "processes"):
        values.pop(key, None)
    if not values.get("parts"):
        values.pop("parts", None)
    return values


def read_pass_rates(path: str | Path, settings: DataSettings) -> dict[str, PassRate]:
    """Read pass rates by prompt id.

    Raises `PromptDataError` if the file cannot be read, or if it belongs to another data set than
    the settings name.
    """
    header, rates = read_file(path)
    identity = msgspec.to_builtins(identity_of(settings))
    if header.data != identity:
        differences = [
            f"{name}: {header.data.get(name)!r} in the file, {identity.get(name)!r} in this run"
            for name in sorted(header.data | identity)
            if header.data.get(name) != identity.get(name)
        ]
        raise PromptDataError(
            f"data.pass_rates={path}: the file belongs to another data set "
            f"({'; '.join(differences)}). {_REMEDY} for this data set"
        )
    return {rate.id: rate for rate in rates}


def judge_differences(
    path: str | Path, reward: RewardSettings, environment: EnvironmentSettings
) -> list[str]:
    """Return the settings under which a file's rates were measured and that differ from these.

    A demonstration is evaluated as a single turn. Raises `PromptDataError`.
    """
    header, _ = read_file(path)
    return [
        f"{section}.{name}: {other.get(name)} in the file, {ours.get(name)} here"
        for section, other, ours in (
            ("reward", header.reward, judge_of(reward)),
            (
                "environment",
                _evaluation_environment(header.environment),
                _evaluation_environment(judge_of(environment)),
            ),
        )
        for name in sorted(other | ours)
        if other.get(name) != ours.get(name)
    ]


def _evaluation_environment(environment: dict[str, Any]) -> dict[str, Any]:
    is_demonstration = environment.get("name") == "demonstration"
    return environment | {"name": "single_turn", "options": {}} if is_demonstration else environment


def read_file(path: str | Path) -> tuple[Header, list[PassRate]]:
    """Read the header and the rates. Raises `PromptDataError`, which names the line."""
    key = f"data.pass_rates={path}"
    return _parse_file(_read_bytes(Path(path), key), key)


def _read_bytes(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptDataError(
            f"{key}: the file cannot be read ({error.strerror}). {_REMEDY}"
        ) from error


def _with_options(identity: dict[str, Any]) -> dict[str, Any]:
    """Return an identity whose generator of reasoning-gym is among the options.

    Older files have it as `task`, and its settings as `task_config`.
    """
    if identity.get("source") == "mixture":
        sources = {name: _with_options(entry) for name, entry in identity["sources"].items()}
        return identity | {"sources": sources}
    if "task" not in identity:
        return identity
    others = {name: value for name, value in identity.items() if not name.startswith("task")}
    return others | {"options": {"task": identity["task"]} | identity.get("task_config", {})}


def _parse_file(content: bytes, key: str) -> tuple[Header, list[PassRate]]:
    lines = content.splitlines()
    header = _decode(lines[0] if lines else b"", Header, f"{key} line 1")
    if header.format != _FORMAT:
        raise PromptDataError(
            f"{key}: the file has format {header.format}, but this version reads format {_FORMAT}. "
            f"{_REMEDY}"
        )
    header = msgspec.structs.replace(header, data=_with_options(header.data))
    rates: dict[str, PassRate] = {}
    for number, line in enumerate(lines[1:], 2):
        rate = _decode(line, PassRate, f"{key} line {number}")
        if rate.id in rates:
            raise PromptDataError(
                f"{key} line {number}: prompt {rate.id[:80]!r} already has a rate, and may have "
                f"only one. {_REMEDY}"
            )
        rates[rate.id] = rate
    return header, list(rates.values())


class PassRateFile:
    """Writes pass rates to `NAME.part`, which `finish` renames to NAME.

    If an interrupted attempt with the same header (apart from the date) left a part, its rates are
    kept.

    rates: rates that are in the file, by prompt id.

    Raises `PromptDataError` if the part has another header.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._part = _part_of(path)
        self.rates = read_part(path, header)
        if self._part.exists():
            # The last line may be incomplete. Its prompt is sampled again.
            self._part.write_bytes(_complete_lines(self._part.read_bytes()))
            return
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._part.write_bytes(msgspec.json.encode(header) + b"\n")

    def add(self, rates: Sequence[PassRate]) -> None:
        """Append rates. They are in the file even if the process ends right after."""
        with self._part.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(rate) + b"\n" for rate in rates))
        self.rates |= {rate.id: rate for rate in rates}

    def finish(self) -> None:
        """Give the complete file its name."""
        self._part.rename(self._path)


def read_part(path: Path, header: Header) -> dict[str, PassRate]:
    """Return the rates that an interrupted attempt to write `path` has left, by prompt id.

    Raises `PromptDataError` if that attempt had another header, apart from the date.
    """
    part = _part_of(path)
    if not part.exists():
        return {}
    key = f"data.pass_rates={part}"
    part_header, rates = _parse_file(_complete_lines(_read_bytes(part, key)), key)
    if differences := _differences(part_header, header):
        raise PromptDataError(
            f"data.pass_rates={path}: {part} belongs to an interrupted attempt with other settings "
            f"({', '.join(differences)}). Remove it, or give another name"
        )
    return {rate.id: rate for rate in rates}


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _complete_lines(content: bytes) -> bytes:
    """Return the lines of a file without an incomplete last one."""
    return content.rpartition(b"\n")[0] + b"\n"


def _differences(first: Header, second: Header) -> list[str]:
    """Return the names of the fields that differ, apart from the date."""
    first_fields: Mapping[str, Any] = msgspec.structs.asdict(first)
    second_fields: Mapping[str, Any] = msgspec.structs.asdict(second)
    return [
        name
        for name, value in second_fields.items()
        if name != "date" and first_fields[name] != value
    ]


def _decode[T](line: bytes, kind: type[T], location: str) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        name = "header" if kind is Header else "pass rate"
        raise PromptDataError(f"{location}: it is no valid {name} ({error}). {_REMEDY}") from error
