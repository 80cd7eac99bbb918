"""The configuration of a command line: composed by Hydra, and every mistake refused before torch is
imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from megatron_rl.config.check import checked
from megatron_rl.config.hydra_errors import as_refusal, as_typed, forbidden_arguments, settings_of
from megatron_rl.config.keys import register
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused

_LAST_WORD_SECONDS = (
    3.0  # torchrun ends every rank once one has ended: let the one that speaks end first
)
HYDRA_CONF = Path(__file__).resolve().parents[2] / "hydra_conf"


def main(run: Callable[[Configuration], int], config_dir: Path) -> int:
    """Compose the configuration from `sys.argv`, check it and call `run` with it. Returns the exit
    code.

    Hydra's own questions (`--help`, `--cfg job`, `--info`) are answered without a run.
    """
    arguments = sys.argv[1:]
    try:
        if any(argument.startswith("-") for argument in arguments):
            return _answer(arguments, config_dir)
        configuration = compose(
            arguments, facts=LaunchFacts.from_environment(os.environ), config_dir=config_dir
        )
    except ConfigurationRefused as refused:
        if os.environ.get("RANK", "0") == "0":
            print(refused, file=sys.stderr)
        else:
            time.sleep(_LAST_WORD_SECONDS)
        return refused.exit_code
    return run(configuration)


def compose(
    overrides: Sequence[str] = (),
    *,
    facts: LaunchFacts | None = None,
    config_dir: Path = HYDRA_CONF,
) -> Configuration:
    """The checked configuration of some overrides. facts: the machine to check against; by default
    one CPU rank.

    Raises `ConfigurationRefused`.
    """
    composed, choices = _compose(overrides, config_dir)
    return checked(composed, choices, facts or LaunchFacts(), overrides)


def _answer(arguments: Sequence[str], config_dir: Path) -> int:
    """Hydra's questions, what is wrong in our words.

    `--cfg job`: resolved where types and limits are kept.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    composed, choices = _compose(arguments, config_dir)
    if not {"--cfg", "-c", "--cfg=job"} & set(arguments):
        hydra.main(str(config_dir), "train_rl", version_base="1.3")(lambda _: None)()
        return ExitCode.OK
    try:
        checked(composed, choices, None, settings_of(arguments))
    except ConfigurationRefused:
        print(OmegaConf.to_yaml(composed), end="", flush=True)
        raise
    print(OmegaConf.to_yaml(composed, resolve=True), end="")
    return ExitCode.OK


def _compose(
    arguments: Sequence[str], config_dir: Path
) -> tuple[DictConfig, dict[str, str | None]]:
    """The composed tree without Hydra's own part, and the option taken of each group."""
    if refused := list(forbidden_arguments(arguments)):
        raise ConfigurationRefused(refused)
    overrides = settings_of(arguments)
    register()
    try:
        with hydra.initialize_config_dir(str(config_dir), version_base="1.3"):
            composed = hydra.compose(
                "train_rl", [*map(as_typed, overrides)], return_hydra_config=True
            )
    except (
        Exception
    ) as error:  # Hydra raises its own, OmegaConf's and plain ValueErrors for bad overrides
        raise ConfigurationRefused([as_refusal(error, overrides)]) from error
    choices = dict(composed.hydra.runtime.choices)
    with open_dict(composed):
        del composed["hydra"]
    return composed, choices
