"""Refuses the files of a split if a part of them would silently not be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.prompts.question import PromptDataError

# NAME-00000-of-00003, with what follows: a hash or nothing, and the file extension
_PART = re.compile(r"(.*[-._])(\d{5})-of-(\d{5})(.*)")
_TABLES = (".csv", ".tsv", ".arrow")
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_MAX_NAMES = 5


def refuse_missing_parts(files: Iterable[Path], key: str, *, pattern: str = "*") -> None:
    """Raise `PromptDataError` if there are fewer than N files NAME-00000-of-N of a name.

    key: `key=path` of the folder, for messages. pattern: of the paths that belong to the split.
    """
    series: dict[tuple[Path, str, str, str], dict[int, str]] = {}
    for file in files:
        if match := _PART.fullmatch(file.name):
            name, number, total, end = match.groups()
            series.setdefault((file.parent, name, total, file.suffix), {})[int(number)] = end
    for (folder, name, total, _), ends in series.items():
        count = int(total)
        first = int(0 not in ends and count in ends)
        end = next(iter(ends.values()))
        missing = [
            f"{name}{number:05d}-of-{total}"
            for number in range(first, first + count)
            if number not in ends
        ]
        missing = [stem for stem in missing if (folder / f"{stem}{end}").match(pattern)]
        if missing:
            raise PromptDataError(
                f"{key}: it holds {len(ends)} of {count} files {name}*-of-{total}, and lacks "
                f"{_list(missing)}. Copy the whole data set, or rename the files to train on these "
                "alone"
            )


def refuse_unreadable(files: Sequence[Path], others: Iterable[Path], key: str) -> None:
    """Raise `PromptDataError` if other files of a split hold data in a format that is not read.

    A JSON file may describe the data. It counts only if its name equals the name of one of the
    files, apart from numbers. key: `key=path` of the folder, for messages.
    """
    names = {_name_without_numbers(file) for file in files}
    left_out = sorted(
        file.name
        for file in others
        if _is_data(file) or (file.suffix == ".json" and _name_without_numbers(file) in names)
    )
    if left_out:
        raise PromptDataError(
            f"{key}: {_list(left_out)} would not be read, because only Parquet and JSONL files are "
            "read. Convert them, or move them out of the folder to train without them"
        )


def _is_data(file: Path) -> bool:
    if file.suffix in _COMPRESSIONS:
        return Path(file.stem).suffix in (".json", ".jsonl", ".parquet", *_TABLES)
    return file.suffix in _TABLES


def _name_without_numbers(file: Path) -> str:
    return re.sub(r"\d+", "", file.name.partition(".")[0])


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
