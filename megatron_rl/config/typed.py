"""From Hydra's composed tree to the typed configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.hydra_errors import Override, as_refusal
from megatron_rl.config.refusal import ConfigurationRefused, Refusal
from megatron_rl.config.schema import TrainRlConfig
from megatron_rl.config.unknown_keys import check_unknown_keys
from megatron_rl.config.validate import validate


def typed_config(
    composed: DictConfig, choices: Mapping[str, str | None], facts: LaunchFacts, overrides: Sequence[str] = ()
) -> TrainRlConfig:
    """Check a composed tree and convert it. choices: the option taken of each group.

    Raises `ConfigurationRefused`.
    """
    refusals = [*check_unknown_keys(composed), *_deleted_sections(composed)]
    try:
        refusals += _missing_values(composed)
        if refusals:
            raise ConfigurationRefused(refusals)
        config = cast(TrainRlConfig, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise ConfigurationRefused([*refusals, as_refusal(error, overrides)]) from error
    if config.run.experiment is None:
        config.run.experiment = choices.get("experiment") or "custom"
    validate(config, facts, given={Override.parse(text).key for text in overrides})
    return config


def _deleted_sections(composed: DictConfig) -> Iterator[Refusal]:
    for declared in fields(TrainRlConfig):
        if declared.name not in composed:
            rule = "Cannot be deleted: every key always exists"
            yield Refusal(declared.name, "", rule, f"Leave out ~{declared.name}, and set the keys that should differ")


def _missing_values(composed: DictConfig) -> list[Refusal]:
    missing = sorted(OmegaConf.missing_keys(composed))
    return [Refusal(key, "???", "It has no default and was not given", f"Give it: {key}=...") for key in missing]
