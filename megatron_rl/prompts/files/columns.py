"""The columns of a file that hold the keys of a row, where they have other names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_rl.contracts.prompt import ROW_KEYS
from megatron_rl.prompts.question import PromptDataError

NESTED_KEYS = ("messages", "tools", "details")
_MEDIA = ("images", "videos")
_INPUTS = {"prompt", "messages"}


@dataclass(frozen=True)
class Columns:
    """The columns of a file that hold the keys of a row.

    names: column by key of a row. A dot leads into an object: `reward_model.ground_truth`. Other
    keys are in the columns with their own names. A column that is named here does not count under
    its own name, and neither does `messages` if `prompt` is named, or the other way round.
    setting: the configuration key with these names, for messages.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    setting: str = "data.columns"

    def sources(self, available: Collection[str]) -> dict[str, str]:
        """Return the column of each key that the file has. available: all columns of the file.

        A column inside of another one is named by the outer one.
        """
        column_of = {key: self._outer(path, available) for key, path in self.names.items()}
        hidden_keys = {*column_of.values(), *self.names}
        if _INPUTS & self.names.keys():
            hidden_keys |= _INPUTS
        sources = {key: key for key in ROW_KEYS if key in available and key not in hidden_keys}
        return sources | {key: column for key, column in column_of.items() if column in available}

    def paths_in(self, column: str, available: Collection[str]) -> list[str]:
        """Return the parts of a column that are read: paths into it, or the whole column."""
        paths = [path for path in self.names.values() if self._outer(path, available) == column]
        return paths or [column]

    def check(self, available: Collection[str], path: Path, key: str) -> None:
        """Raise `PromptDataError` if a table lacks the columns of questions, or has one twice.

        path: the file. key: `key=path` of the data. Both are for messages.
        """
        has = f"It has: {', '.join(map(str, available)) or 'no columns'}"
        for name, column in self.names.items():
            if self._outer(column, available) not in available:
                raise PromptDataError(
                    f"{self.setting}.{name}={column}: {path} has no such column. {has}. Name the "
                    f"column with the {name}"
                )
        if not _INPUTS & self.sources(available).keys():
            raise PromptDataError(
                f"{key}: {path} has neither a column `prompt` nor a column `messages`. {has}. Name "
                f"the columns: {self.setting}.prompt=COLUMN {self.setting}.answer=COLUMN"
            )
        for column in (*self.sources(available).values(), *self.media(available)):
            if list(available).count(column) > 1:
                raise PromptDataError(f"{key}: {path} has two columns `{column}`. Remove one")

    def media(self, available: Collection[str]) -> list[str]:
        """Return the columns with images or videos, where the file is of another trainer."""
        return [name for name in _MEDIA if name in available] if self.names else []

    def rename(self, row: bytes) -> bytes:
        """Return a row, a JSON object, with the keys that `parse_question` reads.

        In a named column, `messages` may be a text, which becomes a user's message. `messages` and
        `tools` may be JSON text, as `details` may be in any row. An `answer` may be a list with one
        element.

        Raises ValueError with the rule and the remedy.
        """
        if not self.names:
            return row
        fields = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
        for name in self.media(fields):
            if msgspec.json.decode(fields[name]):
                raise ValueError(f"the row has `{name}`, which models of texts do not read")
        result = {key: fields[key] for key in self.sources(fields) if key not in self.names}
        for key, path in self.names.items():
            value = self._find(fields, key, path)
            if value is not None:
                result[key] = _converted(key, value)
        return msgspec.json.encode(result)

    def explain(self, problem: str) -> str:
        """Return a problem of a row with the columns of the keys that it names."""
        notes = [
            f"{self.setting}.{key}={path}"
            for key, path in self.names.items()
            if f"`{key}`" in problem or f"`{key}[" in problem or f"$.{key}" in problem
        ]
        return f"{problem} ({', '.join(notes)})" if notes else problem

    def _outer(self, path: str, available: Collection[str]) -> str:
        return path if path in available else path.partition(".")[0]

    def _find(self, fields: Mapping[str, msgspec.Raw], key: str, path: str) -> msgspec.Raw | None:
        """Return the value of a key as JSON, None for a missing one that a row may lack."""
        column = self._outer(path, fields)
        value = fields.get(column)
        for name in path.removeprefix(column).split(".")[1:]:
            value = None if value is None else _members(value).get(name)
        if value is None and key in _INPUTS:
            raise ValueError(
                f"the row has no column `{path}`, which {self.setting}.{key} names. It has: "
                f"{', '.join(fields) or 'no columns'}. Name the column with the {key}"
            )
        return value


def _members(value: msgspec.Raw) -> Mapping[str, msgspec.Raw]:
    """Return the values of an object, which may be JSON text. Other values have none."""
    try:
        if bytes(value)[:1] == b'"':
            value = msgspec.Raw(msgspec.json.decode(value, type=str).encode())
        return msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return {}


def _converted(key: str, value: msgspec.Raw) -> msgspec.Raw:
    """Return the value of a named column in the form that a row has."""
    first = bytes(value)[:1]
    if key in NESTED_KEYS and first == b'"':
        text = msgspec.json.decode(value, type=str)
        if _is_list_of_objects(text):
            return msgspec.Raw(text.encode())
        if key == "messages":
            return msgspec.Raw(msgspec.json.encode([{"role": "user", "content": text}]))
    if key == "answer" and first == b"[":
        elements = msgspec.json.decode(value, type=list[msgspec.Raw])
        if len(elements) == 1:
            return elements[0]
        raise ValueError(
            f"`answer` is a list of {len(elements)} values. A row has one reference answer: name "
            "a column with one, or write your own reward (reward=custom)"
        )
    return value


def _is_list_of_objects(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
    except msgspec.MsgspecError:
        return False
    return True
