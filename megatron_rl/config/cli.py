"""The configuration of a command line: composed by Hydra and checked before torch is imported."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from megatron_rl.config.check import Recompose, check_configuration, resolve_tree
from megatron_rl.config.hydra_errors import (
    composition_refusal,
    forbidden_arguments,
    overrides_of,
    repeated_settings,
    unparsable_overrides,
)
from megatron_rl.config.keys import register
from megatron_rl.config.overrides import quote_text
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused

# torchrun ends every rank once one of them has ended, so the rank that reports must end first.
_REPORT_SECONDS = 3.0
HYDRA_CONF = Path(__file__).resolve().parents[2] / "hydra_conf"


def main(run: Callable[[Configuration], int], config_dir: Path) -> int:
    """Compose the configuration of `sys.argv`, check it and call `run` with it.

    Hydra's own questions (`--help`, `--cfg job`, `--info`) are answered without a run. Returns the
    exit code.
    """
    arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == "0":
        for sentence in repeated_settings(overrides_of(arguments)):
            print(sentence, file=sys.stderr)
    try:
        if any(argument.startswith("-") for argument in arguments):
            return _answer(arguments, config_dir)
        configuration = compose(
            arguments, facts=LaunchFacts.from_environment(os.environ), config_dir=config_dir
        )
    except ConfigurationRefused as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        else:
            time.sleep(_REPORT_SECONDS)
        return error.exit_code
    return run(configuration)


def compose(
    overrides: Sequence[str] = (),
    *,
    facts: LaunchFacts | None = None,
    config_dir: Path = HYDRA_CONF,
) -> Configuration:
    """Return the checked configuration of some overrides.

    facts: the machine to check the rules against; by default one rank on a CPU.

    Raises `ConfigurationRefused`.
    """
    tree, choices = _compose(overrides, config_dir)
    return check_configuration(
        tree, choices, facts or LaunchFacts(), overrides, recompose=_recompose(config_dir)
    )


def _answer(arguments: Sequence[str], config_dir: Path) -> int:
    """Answer Hydra's questions; mistakes are reported in our own words.

    `--cfg job` prints the configuration with its interpolations resolved, if types and limits hold.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` then ends the output without an error
    tree, choices = _compose(arguments, config_dir)
    if not {"--cfg", "-c", "--cfg=job"} & set(arguments):
        hydra.main(str(config_dir), "train_rl", version_base="1.3")(lambda _: None)()
        return ExitCode.OK
    try:
        check_configuration(
            tree, choices, None, overrides_of(arguments), recompose=_recompose(config_dir)
        )
    except ConfigurationRefused:
        print(OmegaConf.to_yaml(tree), end="", flush=True)
        raise
    print(OmegaConf.to_yaml(resolve_tree(tree)), end="")
    return ExitCode.OK


def _compose(
    arguments: Sequence[str], config_dir: Path
) -> tuple[DictConfig, dict[str, str | None]]:
    """Return the composed tree without Hydra's own part, and the option chosen for each group."""
    overrides = overrides_of(arguments)
    refusals = list(forbidden_arguments(arguments)) or list(unparsable_overrides(overrides))
    if refusals:
        raise ConfigurationRefused(refusals)
    register()
    with hydra.initialize_config_dir(str(config_dir), version_base="1.3"):
        try:
            tree = _compose_tree(overrides)
        # Hydra raises its own errors, OmegaConf's and plain ValueErrors for mistakes of users.
        except Exception as error:
            refusal = composition_refusal(error, overrides, _compose_tree)
            raise ConfigurationRefused([refusal]) from error
    choices = dict(tree.hydra.runtime.choices)
    with open_dict(tree):
        del tree["hydra"]
    return tree, choices


def _recompose(config_dir: Path) -> Recompose:
    return lambda overrides: _compose(overrides, config_dir)[0]


def _compose_tree(overrides: Sequence[str]) -> DictConfig:
    return hydra.compose("train_rl", [*map(quote_text, overrides)], return_hydra_config=True)
