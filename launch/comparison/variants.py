"""What a comparison is made of: variants, and their runs with checked configurations."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.cli import compose
from megatron_rl.config.hydra_errors import split_override
from megatron_rl.config.schema import Configuration
from megatron_rl.config.values import NAME
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused, format_value
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import flat_settings, read_ranks, read_settings
from megatron_rl.records.run_directory import to_yaml
from megatron_rl.records.run_lock import run_is_alive

# Keys that overrides may not set, and what sets them
_OURS = {
    "experiment": "--experiment",
    "seed": "--seeds",
    "run.root": "--out",
    "run.name": "the variant's name",
    "run.on_existing": "this script, which runs again what did not complete",
}
_WHERE_THE_ENGINE_IS = ("engine.mode", "engine.urls", "engine.key_file")
_LARGEST_SEED = 2**32 - 1


class ComparisonRefused(Failure):
    """What was asked for cannot be compared; nothing was started."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class Variant:
    """overrides: its own, without those of all variants."""

    name: str
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One variant with one seed. asked: its configuration as {"section.key": value}, without the
    run's own section and where its engine is, and its number of ranks. trial: of a search, where
    diverging is a result."""

    variant: str
    seed: int
    directory: Path
    overrides: tuple[str, ...]
    configuration: Configuration
    asked: dict[str, Any]
    trial: bool = False


@dataclass(frozen=True)
class RunPlanner:
    """Makes runs in `root`. common: overrides of all of them, before each one's own."""

    root: Path
    experiment: str
    ranks: int
    common: tuple[str, ...] = ()
    trial: bool = False

    def run(self, variant: str, overrides: Sequence[str], seed: int, *, label: str) -> Run:
        """label: of the run's directory, before its seed. Raises `ComparisonRefused`."""
        name = f"{label}-seed{seed}"
        ours = (
            f"seed={seed}",
            f"run.root={self.root}",
            f"run.name={name}",
            "run.on_existing=overwrite_failed",
        )
        overrides = (f"experiment={self.experiment}", *self.common, *overrides, *ours)
        ranks = {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        try:
            configuration = compose(
                overrides, facts=LaunchFacts.from_environment(os.environ | ranks)
            )
        except ConfigurationRefused as refused:
            told = f"--variant {variant}, seed {seed}" + (
                f", run {name}" if label != variant else ""
            )
            raise ComparisonRefused(f"{told}: {refused}") from refused
        asked = _compared(flat_settings(to_yaml(configuration)), self.ranks)
        return Run(variant, seed, self.root / name, overrides, configuration, asked, self.trial)


def read_variants(given: Sequence[Sequence[str]], seeds: Sequence[int]) -> list[Variant]:
    """Those of `--variant NAME: key=value ...`. seeds: of those without their own. Raises
    `ComparisonRefused`.
    """
    variants: dict[str, Variant] = {}
    for head, *overrides in given:
        name, own = _head(head, seeds)
        if name in variants:
            raise ComparisonRefused(
                f"--variant {name}: another one has this name, which its runs would share. Rename one"
            )
        check_overrides(overrides, f"--variant {name}")
        variants[name] = Variant(name, own, tuple(overrides))
    return list(variants.values())


def check_overrides(overrides: Sequence[str], said_by: str) -> None:
    """Raise `ComparisonRefused` for keys that a comparison sets itself."""
    for override in overrides:
        if (key := split_override(override)[0].lstrip("+~")) in _OURS:
            raise ComparisonRefused(
                f"{said_by}: {override}: {key} is set by {_OURS[key]}. Leave it out"
            )


def read_seeds(text: str) -> tuple[int, ...]:
    """The seeds of `0,1,2`. Raises ValueError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isascii() or not word.isdigit() or int(word) > _LARGEST_SEED:
            raise ValueError(
                f"{word!r} is not a seed: give whole numbers with commas, such as 0,1,2"
            )
    seeds = tuple(int(word) for word in words)
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"{text} names a seed twice, and so would two runs be named. Give each once"
        )
    return seeds


def _head(head: str, common_seeds: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The name and the seeds of `NAME:` or `NAME@SEEDS:`."""
    name, at, own = head.removesuffix(":").partition("@")
    if not head.endswith(":"):
        raise ComparisonRefused(
            f"--variant {head}: a variant begins with its name and a colon, and a space follows: "
            f"--variant {re.split('[:=]', head)[0]}: key=value ..."
        )
    if not re.fullmatch(NAME, name):
        raise ComparisonRefused(
            f"--variant {head}: the name becomes a directory's. Use letters, digits, '-' and '_'"
        )
    try:
        return name, read_seeds(own) if at else tuple(common_seeds)
    except ValueError as error:
        raise ComparisonRefused(f"--variant {head}: {error}") from error


def _compared(settings: dict[str, Any], ranks: int | None) -> dict[str, Any]:
    elsewhere = {key for key in settings if key.startswith("run.")} | {*_WHERE_THE_ENGINE_IS}
    compared = {key: value for key, value in settings.items() if key not in elsewhere}
    return compared if ranks is None else {"number of ranks": ranks} | compared


def has_diverged(run: Run) -> bool:
    """Whether a trial ended because its numbers were no longer finite."""
    ended = read_exit_record(run.directory)
    return run.trial and ended is not None and ended.code == ExitCode.NON_FINITE


def is_complete(run: Run) -> bool:
    """Whether the run was made already.

    Raises `ComparisonRefused` where another is in its place, or it is going on.
    """
    ended = read_exit_record(run.directory)
    if ended is None or (ended.code != ExitCode.OK and not has_diverged(run)):
        if run_is_alive(run.directory):
            raise ComparisonRefused(
                f"{run.directory} is a run under way. Wait for its end, or give another --out"
            )
        return False
    made = _compared(read_settings(run.directory), read_ranks(run.directory))
    keys = [
        key
        for key in run.asked | made
        if key not in made or key not in run.asked or made[key] != run.asked[key]
    ]
    if keys:
        told = "\n".join(
            f"  {key}: {_value(made, key)} there, {_value(run.asked, key)} asked for"
            for key in keys
        )
        raise ComparisonRefused(
            f"{run.directory} holds a complete run of another configuration, which is not relabelled:\n{told}\n"
            "Give another --out, or move that run away"
        )
    return True


def _value(settings: dict[str, Any], key: str) -> str:
    return format_value(settings[key]) if key in settings else "nothing"
