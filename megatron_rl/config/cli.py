"""The configuration of a command line: composed by Hydra, and every mistake refused before torch is imported."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, open_dict

from megatron_rl.config.check import checked
from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.hydra_errors import as_refusal, forbidden_arguments
from megatron_rl.config.keys import register
from megatron_rl.config.refusal import ConfigurationRefused
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode

_LAST_WORD_SECONDS = 3.0  # torchrun ends every rank once one has ended: let the one that speaks end first
HYDRA_CONF = Path(__file__).resolve().parents[2] / "hydra_conf"


def main(run: Callable[[Configuration], int], config_dir: Path) -> int:
    """Compose the configuration from `sys.argv`, check it and call `run` with it. Returns the exit code.

    Hydra's own questions (`--help`, `--cfg job`, `--info`) are answered without a run.
    """
    arguments = sys.argv[1:]
    try:
        if any(argument.startswith("-") for argument in arguments):
            # what is wrong is refused in our words; an argument without a value belongs to a question, as job to --cfg
            _compose([a for a in arguments if "=" in a or a.startswith(("-", "~"))], config_dir)
            hydra.main(str(config_dir), "train_rl", version_base="1.3")(lambda _: None)()
            return ExitCode.OK
        configuration = compose(arguments, facts=LaunchFacts.from_environment(os.environ), config_dir=config_dir)
    except ConfigurationRefused as refused:
        if os.environ.get("RANK", "0") == "0":
            print(refused, file=sys.stderr)
        else:
            time.sleep(_LAST_WORD_SECONDS)
        return refused.exit_code
    return run(configuration)


def compose(
    overrides: Sequence[str] = (), *, facts: LaunchFacts | None = None, config_dir: Path = HYDRA_CONF
) -> Configuration:
    """The checked configuration of some overrides. facts: the machine to check against; by default one CPU rank.

    Raises `ConfigurationRefused`.
    """
    composed = _compose(overrides, config_dir)
    choices = dict(composed.hydra.runtime.choices)
    with open_dict(composed):
        del composed["hydra"]
    return checked(composed, choices, facts or LaunchFacts(), overrides)


def _compose(arguments: Sequence[str], config_dir: Path) -> DictConfig:
    if refused := list(forbidden_arguments(arguments)):
        raise ConfigurationRefused(refused)
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    register()
    try:
        with hydra.initialize_config_dir(str(config_dir), version_base="1.3"):
            return hydra.compose("train_rl", overrides, return_hydra_config=True)
    except Exception as error:  # Hydra raises its own, OmegaConf's and plain ValueErrors for bad overrides
        raise ConfigurationRefused([as_refusal(error, overrides)]) from error
