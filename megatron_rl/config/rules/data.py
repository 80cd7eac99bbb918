"""Where prompts come from: each source has its own keys, and the files exist."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import DataConfig


def check_data(data: DataConfig, given: Collection[str]) -> Iterator[Refusal]:
    """Required keys of the source, keys of another source, missing files, a generator package that is missing.

    given: keys of the command line. Counts that a recipe brings along may go unused; those a user asks for may not.
    """
    yield from _check_foreign_keys(data)
    yield from _check_counts(data, given)
    if data.source == "jsonl":
        yield from _check_files(data)
    elif data.source == "reasoning_gym":
        yield from _check_generator(data)


def _check_foreign_keys(data: DataConfig) -> Iterator[Refusal]:
    keys = (
        ("train_path", data.train_path, "jsonl"),
        ("eval_path", data.eval_path, "jsonl"),
        ("task", data.task, "reasoning_gym"),
        ("task_config", data.task_config or None, "reasoning_gym"),
    )
    for name, value, source in keys:
        if value is not None and data.source != source:
            rule = f"It has no meaning with data.source={data.source}"
            yield Refusal(f"data.{name}", value, rule, f"Remove it, or choose data={source}")


def _check_counts(data: DataConfig, given: Collection[str]) -> Iterator[Refusal]:
    if data.source != "jsonl":
        return
    if "data.num_train" in given and data.num_train != DataConfig.num_train:
        rule = "All rows of data.train_path are used, whatever it says"
        yield Refusal("data.num_train", data.num_train, rule, "Remove it, or give a shorter file")
    if "data.num_eval" in given and data.num_eval != DataConfig.num_eval and data.eval_path is not None:
        rule = "All rows of data.eval_path are used, whatever it says"
        yield Refusal("data.num_eval", data.num_eval, rule, "Remove it, or give a shorter file")


def _check_files(data: DataConfig) -> Iterator[Refusal]:
    if data.train_path is None:
        rule = "data.source=jsonl needs a file of training questions"
        yield Refusal("data.train_path", None, rule, "Give one: data.train_path=train.jsonl")
    for key, value in (("data.train_path", data.train_path), ("data.eval_path", data.eval_path)):
        if value is not None and not Path(value).is_file():
            rule = f"There is no such file (from {Path.cwd()})"
            yield Refusal(key, value, rule, "Give the path of a JSONL file")
    if data.train_path and data.eval_path and Path(data.train_path).resolve() == Path(data.eval_path).resolve():
        rule = "It is the training file, so nothing would be held out"
        yield Refusal("data.eval_path", data.eval_path, rule, "Leave it out: data.num_eval questions are held out")


def _check_generator(data: DataConfig) -> Iterator[Refusal]:
    if data.task is None:
        rule = "data.source=reasoning_gym needs a generator's name"
        yield Refusal("data.task", None, rule, "Give one: data.task=chain_sum")
    if importlib.util.find_spec("reasoning_gym") is None:
        yield Refusal("data.source", data.source, "reasoning-gym is not installed", "Run make extras")
