"""Rules of the data: sources, their files, and pass rates."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration, DataSettings, SourceSettings
from megatron_rl.contracts.paths import new_directory_problem, path_problem
from megatron_rl.contracts.plugins import PYTHONPATH_REMEDY, missing_module
from megatron_rl.contracts.prompt import ROW_KEYS

# The number of different questions that a finite task has on each side of its split, for any seed.
CAPACITY = {
    "two_digit_addition": {
        "data.num_train": ("training", 8_785),
        "data.num_eval": ("held-out", 1_215),
    }
}
_FILES = ("jsonl", "csv", "parquet", "hf_dataset")
# The sources that read a key. The first one is the remedy.
_OWNERS = {
    "train_path": _FILES,
    "eval_path": _FILES,
    "columns": _FILES,
    "split": ("hf_dataset", "parquet"),
    "eval_split": ("hf_dataset", "parquet", "jsonl", "csv"),
    "sources": ("mixture",),
}
_EXAMPLES = {
    "jsonl": "train.jsonl",
    "csv": "train.csv",
    "parquet": "train.parquet",
    "hf_dataset": "my_dataset",
}
_PATH_REMEDIES = {
    "": "Give the path of a file or of a folder",
    "jsonl": "Give the path of a JSONL file. data=parquet and data=hf_dataset read folders",
    "csv": "Give the path of a CSV file",
    "parquet": "Give the path of a Parquet file, or of a folder of them",
    "hf_dataset": "Give the folder of a data set",
}
# A source's name begins the ids of its prompts, and is a part of metric names.
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MIXTURE_EXAMPLE = (
    "data.sources={sums: {source: jsonl, train_path: sums.jsonl, weight: 1}, letters: {source: "
    "letter_sorting, weight: 1}}"
)
_PROFILE_TOOL = "python launch/profile_prompts.py writes one"


def check_data(c: Configuration, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield broken rules about keys of the data source and the number of its questions.

    The number of questions of a file or a generator is known only when it is read. The prompt
    source then holds the same rules. keys: keys that the command line sets.
    """
    data = c.data
    for name, owners in _OWNERS.items():
        if getattr(data, name) and data.source not in owners:
            rule = f"data.source={data.source} does not read this key"
            yield BrokenRule(f"data.{name}", rule, f"Remove it, or choose data={owners[0]}")
    if not _reads_questions(c):
        return
    for key, (side, capacity) in CAPACITY.get(data.source, {}).items():
        if attrgetter(key)(c) > capacity:
            rule = f"{data.source} has only {capacity} {side} questions"
            yield BrokenRule(key, rule, f"Use {key}={capacity}, or data=column_addition")
    if data.source == "mixture":
        yield from _check_mixture(c)
        return
    yield from _check_source(data, "data")
    yield from _check_letters(c, data.source)
    if data.source in _FILES:
        yield from _check_counts(data, keys)
    elif c.rollout.prompts_per_step > data.num_train:
        rule = f"data.num_train={data.num_train} questions cannot fill one step"
        yield BrokenRule("rollout.prompts_per_step", rule, "Lower it, or raise data.num_train")


def _reads_questions(c: Configuration) -> bool:
    """Return whether the mode reads the questions of data.*, as run/data.py does."""
    return c.has_engines and not (c.mode == "eval" and c.eval.sets)


def _check_mixture(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about data.sources. Each names the source, and the key in it."""
    key = "data.sources"
    sources = c.data.sources
    if not sources:
        rule = "data.source=mixture needs its sources by name, with weights"
        yield BrokenRule(key, rule, f"Give them: {_MIXTURE_EXAMPLE}")
    for name, source in sources.items():
        if not _SOURCE_NAME.fullmatch(name):
            rule = f"{name!r}: a name of a source has only letters, digits, '_' and '-'"
            yield BrokenRule(key, rule, "Rename the source")
            continue
        section = f"{key}.{name}"
        yield from _check_source(source, section)
        yield from _check_owners(source, section)
        yield from _check_letters(c, source.source)
    paths = _shared_training_files(sources)
    for path, names in paths.items():
        rule = f"{' and '.join(names)} read the same training file, {path}"
        yield BrokenRule(key, rule, "Name it once, with the sum of the weights")


def _shared_training_files(sources: Mapping[str, SourceSettings]) -> dict[str, list[str]]:
    names_by_path: dict[tuple[str, str | None], list[str]] = {}
    for name, source in sources.items():
        if source.train_path:
            place = (os.path.realpath(source.train_path), source.split)
            names_by_path.setdefault(place, []).append(name)
    return {path: names for (path, _), names in names_by_path.items() if len(names) > 1}


def _check_owners(source: SourceSettings, section: str) -> Iterator[BrokenRule]:
    """Yield broken rules about keys that a source of a mixture does not read."""
    for key, owners in _OWNERS.items():
        if key != "sources" and getattr(source, key) and source.source not in owners:
            rule = f"source={source.source} does not read this key"
            yield BrokenRule(f"{section}.{key}", rule, f"Remove it, or use source={owners[0]}")
    if source.options and source.source != "reasoning_gym" and ":" not in source.source:
        rule = f"source={source.source} reads no options"
        remedy = "Remove them, or use reasoning_gym. A user-defined class gets them, too"
        yield BrokenRule(f"{section}.options", rule, remedy)
    if ":" in source.source and (problem := missing_module(source.source)):
        yield BrokenRule(f"{section}.source", problem, PYTHONPATH_REMEDY)


def _check_source(data: DataSettings | SourceSettings, section: str) -> Iterator[BrokenRule]:
    """Yield broken rules about one source. section: the section of its keys."""
    if data.source == "reasoning_gym":
        yield from _check_generator(data, section)
    if data.source in _FILES:
        yield from _check_files(data, section)
    if data.eval_split is None and _is_same_file(data.train_path, data.eval_path):
        remedy = "Leave it out: data.num_eval questions are then held out of the training file"
        yield BrokenRule(f"{section}.eval_path", "It is the training file", remedy)


def _is_same_file(path: str | None, other: str | None) -> bool:
    if not path or not other:
        return False
    return os.path.realpath(path) == os.path.realpath(other)


def _check_generator(data: DataSettings | SourceSettings, section: str) -> Iterator[BrokenRule]:
    if not isinstance(data.options.get("task"), str):
        rule = f"{section}.source=reasoning_gym needs the name of a generator, options.task"
        remedy = f"Give one: {section}.options.task=chain_sum"
        yield BrokenRule(f"{section}.options", rule, remedy)
    if find_spec("reasoning_gym") is None:
        yield BrokenRule(f"{section}.source", "reasoning-gym is not installed", "Run make extras")


def _check_letters(c: Configuration, source: str) -> Iterator[BrokenRule]:
    """Yield a broken rule if answers that are no numbers are compared as numbers."""
    is_scored_by_number = c.reward.name == "exact_match" and c.reward.answer == "last_number"
    if source == "letter_sorting" and is_scored_by_number:
        rule = "The answers of letter_sorting are letters, not numbers"
        yield BrokenRule("reward.answer", rule, "Use reward.answer=last_line")


def check_columns(columns: Mapping[str, str], key: str) -> Iterator[BrokenRule]:
    """Yield broken rules about the columns that hold the keys of a row. key: data.columns."""
    unknown = [name for name in columns if name not in ROW_KEYS]
    if unknown:
        rule = f"A row has no key {unknown[0]!r}"
        remedy = f"Name the column of one of its keys: {', '.join(ROW_KEYS)}"
        yield BrokenRule(key, rule, remedy)
    if {"prompt", "messages"} <= columns.keys():
        rule = "A row has `prompt` or `messages`, not both"
        yield BrokenRule(key, rule, "Name the column of one of them")


def _check_files(data: DataSettings | SourceSettings, section: str) -> Iterator[BrokenRule]:
    yield from check_columns(data.columns, f"{section}.columns")
    if data.train_path is None:
        rule = f"{section}.source={data.source} needs a file of questions"
        remedy = f"Give one: {section}.train_path={_EXAMPLES[data.source]}"
        yield BrokenRule(f"{section}.train_path", rule, remedy)
    else:
        yield from _check_path(data.source, data.train_path, f"{section}.train_path", data.split)
    if data.eval_path is not None:
        # Held-out questions may have another format, which the file itself tells
        yield from _check_path("", data.eval_path, f"{section}.eval_path", data.eval_split)
    elif data.eval_split is not None:
        yield from _check_splits(data, section)


def _check_splits(data: DataSettings | SourceSettings, section: str) -> Iterator[BrokenRule]:
    """Yield broken rules about a split of held-out questions in the training folder."""
    key = f"{section}.eval_split"
    if data.train_path is not None and not Path(data.train_path).is_dir():
        rule = f"{section}.train_path={data.train_path} is a file, which has no splits"
        yield BrokenRule(key, rule, f"Remove it, or name a file in {section}.eval_path")
    elif data.eval_split == (data.split or "train"):
        yield BrokenRule(key, "It is the training split", "Name another one, or leave it null")


def _check_path(source: str, path: str, key: str, split: str | None) -> Iterator[BrokenRule]:
    """Yield broken rules about a path.

    source: format that reads it, "" for any format. split: the split that is chosen in it.
    """
    is_folder = Path(path).is_dir()
    reads_folders = source not in ("jsonl", "csv")
    if (problem := path_problem(path, folder=is_folder and reads_folders)) is not None:
        yield BrokenRule(key, f"{problem} (from {Path.cwd()})", _PATH_REMEDIES[source])
    elif not is_folder and (mismatch := _format_mismatch(source, Path(path).suffix.lower())):
        yield BrokenRule(key, *mismatch)
    elif split is not None and not is_folder:
        split_key = key.replace("train_path", "split").replace("eval_path", "eval_split")
        yield BrokenRule(split_key, f"{key}={path} is a file, which has no splits", "Remove it")


def _format_mismatch(source: str, suffix: str) -> tuple[str, str] | None:
    """Return rule and remedy for a file that its suffix assigns to another source."""
    other = {".parquet": "parquet", ".csv": "csv"}.get(suffix, "jsonl")
    if source == "hf_dataset":
        return "It is a file, not the folder of a data set", f"Use data={other}"
    if source == "csv" and suffix not in (".csv", ".parquet"):
        return "Its name does not end with .csv", "Rename it, or use data=jsonl"
    if source in ("jsonl", "csv") and suffix == ".parquet":
        return "It is a Parquet file", "Use data=parquet"
    if source in ("jsonl", "parquet") and suffix == ".csv":
        return "It is a CSV file", "Use data=csv"
    if source == "parquet" and suffix in (".jsonl", ".json"):
        return "It is a JSON file, not a Parquet file", "Use data=jsonl"
    return None


def _check_counts(data: DataSettings, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield broken rules about numbers of questions that files decide."""
    counts = {"data.train_path": "num_train"}
    if data.eval_path is not None:
        counts["data.eval_path"] = "num_eval"
    elif data.eval_split is not None:
        counts["data.eval_split"] = "num_eval"
    for key, count in counts.items():
        # An experiment's file may set counts for its own task. On the command line they would have
        # no effect.
        if f"data.{count}" in keys and getattr(data, count) != getattr(DataSettings, count):
            rule = f"All rows of {key} are used, so that this setting has no effect"
            yield BrokenRule(f"data.{count}", rule, "Remove it")


def check_pass_rates(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about the file of pass rates and their range.

    The prompts that the file knows are compared with the data only when it is read.
    """
    if not _reads_questions(c):
        return
    if c.mode == "profile":
        yield from _check_new_pass_rates(c.data.pass_rates)
    elif c.data.pass_rates is not None:
        problem = path_problem(c.data.pass_rates, folder=False)
        if problem is not None:
            rule = f"{problem} (from {Path.cwd()})"
            yield BrokenRule("data.pass_rates", rule, f"{_PROFILE_TOOL}, or leave it null")
    limits = c.data.pass_rate_range
    if limits is None:
        return
    if c.mode == "profile" or c.data.pass_rates is None:
        rule = "The pass rates of the prompts are not known"
        remedy = f"Leave it null, or give data.pass_rates: {_PROFILE_TOOL}"
        yield BrokenRule("data.pass_rate_range", rule, remedy)
    if len(limits) != 2 or limits[0] > limits[1]:
        rule = "It is [low, high], with low at most high"
        remedy = "Give such a pair, for example [0.1,0.9]"
        yield BrokenRule("data.pass_rate_range", rule, remedy)


def _check_new_pass_rates(path: str | None) -> Iterator[BrokenRule]:
    """Yield a broken rule if mode=profile cannot write pass rates to this path."""
    key = "data.pass_rates"
    if path is None:
        rule = "mode=profile writes pass rates to a file"
        yield BrokenRule(key, rule, "Give data.pass_rates=rates.jsonl")
    elif Path(path).exists():
        rule = "mode=profile writes a new file, and this one exists already"
        yield BrokenRule(key, rule, "Give another name, or remove the file")
    elif problem := new_directory_problem(str(Path(path).parent)):
        rule = f"{problem} (from {Path.cwd()})"
        yield BrokenRule(key, rule, "Give a path where a file can be written")
