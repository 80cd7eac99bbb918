"""Finds keys that the schema does not declare."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_rl.config import schema
from megatron_rl.config.refusal import Refusal
from megatron_rl.config.store import ALGORITHMS


def check_unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[Refusal]:
    """Refusals of every key below a structured node that its dataclass does not declare. Free dictionaries pass."""
    declared = OmegaConf.get_type(node)
    if declared is None or not is_dataclass(declared):
        return
    known = {item.name for item in fields(declared)}
    for name in map(str, node):
        key = f"{prefix}{name}"
        child = node._get_node(name)
        if name not in known:
            value = OmegaConf.to_container(child) if isinstance(child, DictConfig) else child
            yield unknown_key(key, value)
        elif isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from check_unknown_keys(child, f"{key}.")


def check_hydra_keys(overrides: Sequence[str]) -> Iterator[Refusal]:
    """Refusals of overrides of Hydra's own settings, but for the place of a user's own files.

    Sweeps, directories and logging belong to the run here.
    """
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        if key != "hydra.searchpath" and key.split("@")[0].split(".")[0].split("/")[0] == "hydra":
            rule = "Hydra's own settings are fixed: one torchrun is one run, and only the run writes files"
            yield Refusal(key, value, rule, "run.root and run.name say where; loop in the shell for several runs")


def unknown_key(key: str, value: Any) -> Refusal:
    """The refusal of a key, with the declared keys that look most like it."""
    return Refusal(key, value, "There is no such key", _suggestion(key))


def declared_keys() -> list[str]:
    """Every declared key by its full name, the keys of all algorithms included."""
    keys = list(_walk(schema.TrainRlConfig, ""))
    for algorithm in ALGORITHMS.values():
        keys += [key for key in _walk(algorithm, "algo.") if key not in keys]
    return keys


def _walk(declared: Any, prefix: str) -> Iterator[str]:
    for item in fields(declared):
        section = item.default_factory if is_dataclass(item.default_factory) else None
        yield f"{prefix}{item.name}"
        if section is not None:
            yield from _walk(section, f"{prefix}{item.name}.")


def _suggestion(key: str) -> str:
    keys = declared_keys()
    if key in keys:
        owners = [f"algo={name}" for name, node in ALGORITHMS.items() if key in set(_walk(node, "algo."))]
        return f"It belongs to {' or '.join(owners)}"
    section, _, name = key.rpartition(".")
    siblings = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == section}
    elsewhere = [known for known in keys if known.rpartition(".")[2] == name]
    close = [siblings[match] for match in difflib.get_close_matches(name, siblings, n=2)] or elsewhere[:3]
    if close:
        return f"Did you mean {' or '.join(close)}?"
    if siblings:
        return f"The keys {f'of {section}' if section else 'at the top'} are {', '.join(siblings)}"
    return "The command python launch/train_rl.py --cfg job prints every key"
