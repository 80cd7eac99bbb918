"""Files of a data set folder, by split.

A folder is one of

- a data set that `save_to_disk` of the library `datasets` wrote: `state.json` with Arrow files, or
  `dataset_dict.json` with a folder for each split
- a copy of a data set from the hub: Parquet or JSONL files. README.md may say which files a split
  has. Otherwise the names of files and folders say it: `train`, `test`, `validation` and their
  variants, as the library reads them.

Nothing is downloaded, and no script of a data set is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.prompts.files.completeness import refuse_missing_parts, refuse_unreadable
from megatron_rl.prompts.question import PromptDataError

SUFFIXES = (".parquet", ".jsonl")
DEFAULT_SPLIT = "train"
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """state.json of a saved data set."""

    data_files: list[_DataFile] = msgspec.field(name="_data_files")
    split: str | None = msgspec.field(name="_split", default=None)
    indices: list[_DataFile] | None = msgspec.field(name="_indices_data_files", default=None)


class _Splits(msgspec.Struct):
    """dataset_dict.json of a saved data set with several splits."""

    splits: list[str]


def files_of_folder(folder: Path, split: str | None, key: str) -> list[Path]:
    """Return the files of a split, in the order of their rows.

    split: None stands for the only split, or for `train` among several.
    key: `key=path` of the folder, for messages. Raises `PromptDataError`.
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            names = _read_json(folder / "dataset_dict.json", _Splits, key).splits
            name = _choose_split(names, split, key)
            return _saved_files(_child(folder, name, key), None, key)
        if (folder / "state.json").is_file():
            return _saved_files(folder, split, key)
        if files_by_split := _declared_files(folder, key):
            files = files_by_split[_choose_split(list(files_by_split), split, key)]
        else:
            files = _named_files(folder, split, key)
    except OSError as error:
        raise PromptDataError(
            f"{key}: the folder cannot be read ({error.strerror}). Give this user access to it"
        ) from error
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1:
        raise PromptDataError(
            f"{key}: a split has files of two formats ({' and '.join(suffixes)}). Keep one of them"
        )
    return files


def natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts `part-2` before `part-10`."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _choose_split(names: Sequence[str], split: str | None, key: str) -> str:
    if split is None and len(names) == 1:
        return names[0]
    name = split or DEFAULT_SPLIT
    if name not in names:
        others = ", ".join(sorted(names)) or "none"
        raise PromptDataError(
            f"{key}: it has no split {name!r}. Its splits are {others}. "
            "Choose one with data.split for training rows, or data.eval_split for held-out rows"
        )
    return name


def _saved_files(folder: Path, split: str | None, key: str) -> list[Path]:
    """Return the files that state.json names."""
    state = _read_json(folder / "state.json", _State, key)
    if split is not None and state.split is not None and state.split != split:
        raise PromptDataError(
            f"{key}: it holds the split {state.split!r} alone, not {split!r}. Choose that one"
        )
    if state.indices:
        raise PromptDataError(
            f"{key}: its rows are chosen by a file of indices, as old versions of `datasets` wrote "
            "it. Save it again with `flatten_indices().save_to_disk(...)`"
        )
    return [_child(folder, file.filename, key) for file in state.data_files]


def _child(folder: Path, name: str, key: str) -> Path:
    """Return a file or folder right inside of a folder. Raises `PromptDataError` for others."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise PromptDataError(f"{key}: its description names {name!r}, which is outside of it")
    return folder / name


def _read_json(path: Path, kind: type[Any], key: str) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise PromptDataError(
            f"{key}: {path} is damaged ({error}). Copy or save the data set again"
        ) from error


def _declared_files(folder: Path, key: str) -> dict[str, list[Path]]:
    """Return the files by split that README.md declares, none if it declares none."""
    readme = folder / "README.md"
    front_matter = _FRONT_MATTER.match(readme.read_text("utf-8")) if readme.is_file() else None
    if front_matter is None:
        return {}
    import yaml  # type: ignore[import-untyped]

    try:
        header = yaml.safe_load(front_matter[1])
    except yaml.YAMLError as error:
        raise PromptDataError(f"{key}: the header of {readme} is no YAML ({error})") from error
    configs = header.get("configs") if isinstance(header, dict) else None
    if not isinstance(configs, list):
        return {}
    config = _choose_subset([entry for entry in configs if isinstance(entry, dict)], key)
    files = {}
    for split, patterns in _patterns_by_split(config.get("data_files")).items():
        files[split] = _matches(folder, patterns, key)
    return files


def _choose_subset(configs: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    with_files = [config for config in configs if config.get("data_files")]
    if len(with_files) <= 1:
        return with_files[0] if with_files else {}
    for config in with_files:
        if config.get("default") is True or config.get("config_name") == "default":
            return config
    names = ", ".join(str(config.get("config_name")) for config in with_files)
    raise PromptDataError(
        f"{key}: the data set has several subsets ({names}), and none is the default. Name the "
        "folder with the files of one"
    )


def _patterns_by_split(data_files: Any) -> dict[str, list[str]]:
    """Return patterns of file names by split, in the forms that the hub allows."""
    if isinstance(data_files, str):
        return {DEFAULT_SPLIT: [data_files]}
    if isinstance(data_files, dict):
        return {str(name): _as_list(patterns) for name, patterns in data_files.items()}
    patterns_by_split: dict[str, list[str]] = {}
    for entry in _as_list(data_files):
        if isinstance(entry, dict):
            name = str(entry.get("split", DEFAULT_SPLIT))
            patterns_by_split.setdefault(name, []).extend(_as_list(entry.get("path")))
        else:
            patterns_by_split.setdefault(DEFAULT_SPLIT, []).append(entry)
    return patterns_by_split


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _matches(folder: Path, patterns: Sequence[Any], key: str) -> list[Path]:
    files: dict[Path, None] = {}
    for pattern in patterns:
        text = str(pattern)
        if "://" in text or text.startswith("/") or ".." in Path(text).parts:
            raise PromptDataError(
                f"{key}: README.md names {text!r}, which is not in the folder. Copy these files "
                "into a folder, and name that"
            )
        paths = list(folder.glob(text))
        matches = [path for path in paths if path.suffix in SUFFIXES]
        if not matches:
            raise PromptDataError(
                f"{key}: README.md names {text!r}, but no Parquet or JSONL file matches. Copy the "
                "whole data set"
            )
        refuse_missing_parts(matches, key, pattern=text)
        refuse_unreadable(matches, paths, key)
        files |= dict.fromkeys(sorted(matches, key=natural_order))
    return list(files)


def _named_files(folder: Path, split: str | None, key: str) -> list[Path]:
    """Return the files of a split that README.md does not declare."""
    files_by_split = _files_by_name(folder, key)
    files = files_by_split[_choose_split(list(files_by_split), split, key)]
    refuse_missing_parts(files, key)
    name = _split_in(files[0].relative_to(folder))
    neighbors = (file for file in _visible_files(folder) if file.parent == files[0].parent)
    others = (file for file in neighbors if _split_in(file.relative_to(folder)) == name)
    refuse_unreadable(files, others, key)
    return files


def _files_by_name(folder: Path, key: str) -> dict[str, list[Path]]:
    """Return the files by the split that their names tell; all belong to `train` if none does."""
    files = sorted(_visible_files(folder), key=natural_order)
    data_files = [file for file in files if file.suffix in SUFFIXES]
    if not data_files:
        suffixes = ", ".join(sorted({file.suffix for file in files if file.suffix})) or "no files"
        raise PromptDataError(
            f"{key}: the folder holds no data set: no dataset_dict.json, no state.json, and no "
            f"Parquet or JSONL files (it has: {suffixes}). Convert the data to Parquet or JSONL. "
            "Scripts of data sets are not executed"
        )
    files_by_split: dict[str, list[Path]] = {}
    for file in data_files:
        files_by_split.setdefault(_split_in(file.relative_to(folder)), []).append(file)
    others = files_by_split.pop("", [])
    if others and files_by_split:
        raise PromptDataError(
            f"{key}: some files name their split and others do not, such as "
            f"{others[0].relative_to(folder)}. Move those to another folder"
        )
    files_by_split = files_by_split or {DEFAULT_SPLIT: others}
    for split, members in files_by_split.items():
        folders = sorted({str(file.parent.relative_to(folder)) for file in members})
        if len(folders) > 1:
            raise PromptDataError(
                f"{key}: files of the split {split!r} lie in several folders "
                f"({', '.join(folders)}), which may be different subsets. Name one of them"
            )
    return files_by_split


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            yield path


def _split_in(path: Path) -> str:
    """Return the split that a path names, "" for none. The file's own name comes first."""
    for part in (path.stem, *reversed(path.parent.parts)):
        words = re.split(r"[-._ 0-9]+", part.lower())
        for split, names in _SPLIT_WORDS.items():
            if any(word in names for word in words):
                return split
    return ""
