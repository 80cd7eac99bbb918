"""Composes the configuration without a command line: for tests, notebooks and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, open_dict

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.hydra_errors import as_refusal
from megatron_rl.config.refusal import ConfigurationRefused
from megatron_rl.config.schema import TrainRlConfig
from megatron_rl.config.store import register
from megatron_rl.config.typed import typed_config
from megatron_rl.config.unknown_keys import check_hydra_keys

HYDRA_CONF = Path(__file__).resolve().parents[2] / "hydra_conf"


def compose(
    overrides: Sequence[str] = (), *, facts: LaunchFacts | None = None, config_dir: Path = HYDRA_CONF
) -> TrainRlConfig:
    """The checked configuration of some overrides. facts: the machine to check against; by default one CPU rank.

    Raises `ConfigurationRefused`.
    """
    if refused := list(check_hydra_keys(overrides)):
        raise ConfigurationRefused(refused)
    register()
    composed, choices = _compose_tree(list(overrides), config_dir)
    return typed_config(composed, choices, facts or LaunchFacts(), overrides)


def _compose_tree(overrides: list[str], config_dir: Path) -> tuple[DictConfig, dict[str, str | None]]:
    try:
        with hydra.initialize_config_dir(str(config_dir), version_base="1.3"):
            composed = hydra.compose("train_rl", overrides, return_hydra_config=True)
    except Exception as error:  # Hydra raises its own, OmegaConf's and plain ValueErrors for bad overrides
        raise ConfigurationRefused([as_refusal(error, overrides)]) from error
    choices = dict(composed.hydra.runtime.choices)
    with open_dict(composed):
        del composed["hydra"]
    return composed, choices
