"""Variants of a comparison, and their runs with checked configurations."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.cli import compose
from megatron_rl.config.overrides import split_override
from megatron_rl.config.schema import Configuration
from megatron_rl.config.values import NAME_PATTERN
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused, format_value
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import flat_settings, read_ranks, read_settings
from megatron_rl.records.run_directory import to_yaml
from megatron_rl.records.run_lock import run_is_alive

# Keys that overrides may not set, and what sets them
_RESERVED_KEYS = {
    "experiment": "--experiment",
    "seed": "--seeds",
    "run.root": "--out",
    "run.name": "the variant's name",
    "run.on_existing": "this command, which repeats runs that did not complete",
}
_ENGINE_LOCATION_KEYS = ("engine.urls", "engine.key_file")
_MAX_SEED = 2**32 - 1


class ComparisonRefused(Failure):
    """The runs cannot be compared. Nothing was started."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class Variant:
    """A variant of the comparison.

    overrides: overrides of this variant alone, without the common ones.
    """

    name: str
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One variant with one seed.

    settings: the configuration as {"section.key": value} with the number of ranks, without the
        section `run` and the location of the engine.
    """

    variant: str
    seed: int
    directory: Path
    overrides: tuple[str, ...]
    configuration: Configuration
    settings: dict[str, Any]


@dataclass(frozen=True)
class RunPlanner:
    """Plans runs in `root`.

    common: overrides of all runs, before the overrides of a single run.
    """

    root: Path
    experiment: str
    ranks: int
    common: tuple[str, ...] = ()

    def run(self, variant: str, overrides: Sequence[str], seed: int) -> Run:
        """Plan one run. Raises `ComparisonRefused`."""
        name = f"{variant}-seed{seed}"
        overrides = (
            f"experiment={self.experiment}",
            *self.common,
            *overrides,
            f"seed={seed}",
            f"run.root={self.root}",
            f"run.name={name}",
            "run.on_existing=overwrite_failed",
        )
        ranks = {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        facts = LaunchFacts.from_environment(os.environ | ranks)
        try:
            configuration = compose(overrides, facts=facts)
        except ConfigurationRefused as refusal:
            where = f"--variant {variant}, seed {seed}"
            raise ComparisonRefused(f"{where}: {refusal}") from refusal
        settings = _comparable(flat_settings(to_yaml(configuration)), self.ranks)
        directory = self.root / name
        return Run(variant, seed, directory, overrides, configuration, settings)


def read_variants(words: Sequence[Sequence[str]], seeds: Sequence[int]) -> list[Variant]:
    """Read the words of every `--variant NAME: key=value ...`. Raises `ComparisonRefused`.

    seeds: seeds of variants without their own.
    """
    variants: dict[str, Variant] = {}
    for head, *overrides in words:
        name, variant_seeds = _read_head(head, seeds)
        if name in variants:
            raise ComparisonRefused(
                f"--variant {name}: another variant has this name, and their runs would share a "
                "directory. Rename one"
            )
        check_overrides(overrides, f"--variant {name}")
        variants[name] = Variant(name, variant_seeds, tuple(overrides))
    return list(variants.values())


def check_overrides(overrides: Sequence[str], option: str) -> None:
    """Raise `ComparisonRefused` for keys that the comparison sets.

    option: the option that holds the overrides.
    """
    for override in overrides:
        key = split_override(override)[0].lstrip("+~")
        if key in _RESERVED_KEYS:
            raise ComparisonRefused(
                f"{option}: {override}: {key} is set by {_RESERVED_KEYS[key]}. Leave it out"
            )


def read_seeds(text: str) -> tuple[int, ...]:
    """Read seeds such as `0,1,2`. Raises ValueError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isascii() or not word.isdigit() or int(word) > _MAX_SEED:
            raise ValueError(
                f"{word!r} is not a seed: give whole numbers with commas, such as 0,1,2"
            )
    seeds = tuple(int(word) for word in words)
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"{text} names a seed twice, and two runs would have one name. Give each seed once"
        )
    return seeds


def _read_head(head: str, common_seeds: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Read the name and the seeds of `NAME:` or `NAME@SEEDS:`."""
    name, at, seeds = head.removesuffix(":").partition("@")
    if not head.endswith(":"):
        raise ComparisonRefused(
            f"--variant {head}: a variant begins with its name, a colon and a space: "
            f"--variant {re.split('[:=]', head)[0]}: key=value ..."
        )
    if not re.fullmatch(NAME_PATTERN, name):
        raise ComparisonRefused(
            f"--variant {head}: the name becomes the name of a directory. Use letters, digits, "
            "'-' and '_'"
        )
    try:
        return name, read_seeds(seeds) if at else tuple(common_seeds)
    except ValueError as error:
        raise ComparisonRefused(f"--variant {head}: {error}") from error


def _comparable(settings: dict[str, Any], ranks: int | None) -> dict[str, Any]:
    """The settings that make two runs equal, with the number of ranks if it is known."""
    comparable = {
        key: value
        for key, value in settings.items()
        if not key.startswith("run.") and key not in _ENGINE_LOCATION_KEYS
    }
    return comparable if ranks is None else {"number of ranks": ranks} | comparable


def is_complete(run: Run) -> bool:
    """True if the run has completed before.

    Raises `ComparisonRefused` if its directory holds another run, or if it is running.
    """
    record = read_exit_record(run.directory)
    if record is None or record.code != ExitCode.OK:
        if run_is_alive(run.directory):
            raise ComparisonRefused(
                f"{run.directory} is a run that is still running. Wait for its end, or give "
                "another --out"
            )
        return False
    settings = _comparable(read_settings(run.directory), read_ranks(run.directory))
    differences = list(_differences(settings, run.settings))
    if differences:
        raise ComparisonRefused(
            "\n".join(
                [
                    f"{run.directory} holds a complete run of another configuration:",
                    *differences,
                    "Give another --out, or move that run away",
                ]
            )
        )
    return True


def _differences(existing: Mapping[str, Any], request: Mapping[str, Any]) -> list[str]:
    return [
        f"  {key}: {_value(existing, key)} in that run, {_value(request, key)} requested"
        for key in {**request, **existing}
        if key not in existing or key not in request or existing[key] != request[key]
    ]


def _value(settings: Mapping[str, Any], key: str) -> str:
    return format_value(settings[key]) if key in settings else "nothing"
