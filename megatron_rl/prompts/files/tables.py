"""Rows of Parquet files and Arrow streams, written as the JSON objects of a JSONL file.

A number keeps its value: an integer and a decimal keep their digits, and a float becomes the
shortest decimal that gives the same float, as in Python's `json`. A null is a key that is missing.

pyarrow is imported when the first table is read. It decodes columns and executes nothing that a
file contains.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.prompts.files.columns import NESTED_KEYS, Columns
from megatron_rl.prompts.question import PromptDataError

_BATCH_ROWS = 256
_TEXT = ("prompt", "response", "task")
_NUMBERS = ("answer", "difficulty")
_encoder = msgspec.json.Encoder(decimal_format="number")

RowOrProblem = bytes | ValueError
"""A row as a JSON object, or the reason why it is none."""


def read_parquet(path: Path, key: str, names: Columns) -> Iterator[RowOrProblem]:
    """Yield the rows of a Parquet file.

    key: `key=path` of the data, for messages. names: the columns with the keys of a row.

    Raises `PromptDataError` if the file cannot be read, or if its columns do not hold
    questions.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with closing(pyarrow.parquet.ParquetFile(path)) as file:
            columns = _check_columns(file.schema_arrow, path, key, names)
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns)
            yield from _rows_of(batches, columns, names)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, key, "Parquet", error) from error


def read_arrow_stream(path: Path, key: str, names: Columns) -> Iterator[RowOrProblem]:
    """Yield the rows of a file that `save_to_disk` of the library `datasets` wrote.

    key, names: as for `read_parquet`. Raises `PromptDataError` as it does.
    """
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            columns = _check_columns(stream.schema, path, key, names)
            yield from _rows_of(_small_batches(stream, columns), columns, names)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, key, "an Arrow stream", error) from error


def _small_batches(stream: Iterable[Any], columns: Sequence[str]) -> Iterator[Any]:
    for batch in stream:
        batch.validate(full=True)  # a damaged offset would read outside of the file
        selection = batch.select(columns)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield selection.slice(start, _BATCH_ROWS)


def _rows_of(
    batches: Iterable[Any], columns: Sequence[str], names: Columns
) -> Iterator[RowOrProblem]:
    for batch in batches:
        writers = [
            _Writer(name, batch.schema.field(name).type, names.paths_in(name, columns))
            for name in columns
        ]
        for index in range(batch.num_rows):
            try:
                yield _encode_row(batch, index, writers)
            except ValueError as error:
                yield ValueError(f"the row cannot be decoded ({error})")


def _encode_row(batch: Any, index: int, writers: Sequence[_Writer]) -> bytes:
    row = {}
    for writer in writers:
        value = batch.column(writer.name)[index].as_py()
        if value is not None:
            row[writer.name] = writer.write(value)
    return _encoder.encode(row)


class _Writer:
    """Writes the values of one column as JSON.

    kind: pyarrow's type of the column. paths: the parts of it that are read, such as
    `reward_model.ground_truth`. A number that is none, such as NaN, is refused there only.
    """

    def __init__(self, name: str, kind: Any, paths: Sequence[str]) -> None:
        self.name = name
        self._kind = kind
        self._paths = paths
        self._is_json_text = name in NESTED_KEYS and _is_text(kind)

    def write(self, value: Any) -> Any:
        """Return a value that msgspec writes as JSON. Raises ValueError."""
        if self._is_json_text:
            return msgspec.json.decode(value)
        return self._convert(value, self._kind, self.name)

    def _convert(self, value: Any, kind: Any, path: str) -> Any:
        """Return a value with its numbers as JSON. kind: pyarrow's type of it."""
        import pyarrow.types as types

        if value is None or not _is_changed(kind):
            return value
        if types.is_dictionary(kind):
            return self._convert(value, kind.value_type, path)
        if types.is_struct(kind):
            fields = [kind.field(index) for index in range(kind.num_fields)]
            return {
                field.name: self._convert(value[field.name], field.type, f"{path}.{field.name}")
                for field in fields
            }
        if types.is_map(kind):
            return {
                key: self._convert(inner, kind.item_type, f"{path}.{key}") for key, inner in value
            }
        if _is_list(kind):
            return [self._convert(inner, kind.value_type, path) for inner in value]
        if isinstance(value, Decimal):
            return msgspec.Raw(format(value, "f").encode())
        return self._digits(value, kind, path)

    def _digits(self, value: float, kind: Any, path: str) -> msgspec.Raw | None:
        # Doubles show digits that a narrower float does not have
        digits = repr(float(str(kind.to_pandas_dtype()(value))))
        if "n" not in digits:
            return msgspec.Raw(digits.encode())
        if any(path == part or path.startswith(f"{part}.") for part in self._paths):
            raise ValueError(f"`{path}` is {digits}, which is no number. Leave the row out")
        return None


@functools.cache
def _is_changed(kind: Any) -> bool:
    """Return whether a type has floats, decimals or maps of texts, which are converted."""
    import pyarrow.types as types

    if types.is_dictionary(kind) or _is_list(kind):
        return _is_changed(kind.value_type)
    if types.is_struct(kind):
        return any(_is_changed(kind.field(index).type) for index in range(kind.num_fields))
    if types.is_map(kind):
        return _is_text(kind.key_type)
    return bool(types.is_floating(kind) or types.is_decimal(kind))


def _check_columns(schema: Any, path: Path, key: str, names: Columns) -> list[str]:
    """Return the columns to read, in the order of the file. Raises `PromptDataError`."""
    available = list(schema.names)
    names.check(available, path, key)
    key_by_column = {column: name for name, column in names.sources(available).items()}
    media = names.media(available)
    columns = [column for column in available if column in (*key_by_column, *media)]
    for column in columns:
        kind = schema.field(column).type
        # Each row of a named column is checked when it is parsed
        is_named = column in media or key_by_column[column] in names.names
        problem = "" if is_named else _type_problem(column, kind)
        if problem:
            raise PromptDataError(
                f"{key}: the column `{column}` of {path} has the type {kind}; it must be "
                f"{problem}. {_type_remedy(column, kind, names.setting)}"
            )
    return columns


def _type_problem(name: str, kind: Any) -> str:
    """Return the types that a column may have, "" if it has one of them."""
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_null(kind) or _is_text(kind):
        return ""
    if name in _TEXT:
        return "text"
    if name == "id":
        return "" if types.is_integer(kind) else "text or an integer"
    if name in _NUMBERS:
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        return "" if is_number else "text or a number"
    return "" if _is_json(kind) else "a list of objects, or JSON text"


def _type_remedy(name: str, kind: Any, setting: str) -> str:
    import pyarrow.types as types

    if types.is_list(kind) and name == "prompt":
        return f"If it holds messages, set {setting}.messages=prompt"
    if types.is_list(kind) and name == "answer":
        return f"If each list holds one answer, set {setting}.answer=answer"
    return f"Convert the column, or name another one: {setting}.{name}=COLUMN"


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_json(kind: Any) -> bool:
    """Return True if JSON has every value of a nested type: no bytes, no times."""
    import pyarrow.types as types

    if _is_list(kind):
        return _is_json(kind.value_type)
    if types.is_struct(kind):
        return all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(_is_text(kind) or is_number or types.is_boolean(kind) or types.is_null(kind))


def _unreadable(path: Path, key: str, form: str, error: Exception) -> PromptDataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return PromptDataError(
        f"{key}: {path} cannot be read as {form} ({reason}). Copy or write the file again"
    )
