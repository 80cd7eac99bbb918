"""The command line of `launch/train_rl.py`: Hydra's, with every mistake refused before torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megatron_rl.config.facts import LaunchFacts, is_first_rank
from megatron_rl.config.hydra_errors import as_refusal
from megatron_rl.config.refusal import ConfigurationRefused, Refusal
from megatron_rl.config.schema import TrainRlConfig
from megatron_rl.config.store import register
from megatron_rl.config.typed import typed_config
from megatron_rl.config.unknown_keys import check_hydra_keys
from megatron_rl.contracts.exit_codes import ExitCode


def main(run: Callable[[TrainRlConfig], int], config_dir: Path) -> int:
    """Compose the configuration from `sys.argv`, check it and call `run` with it. Returns the exit code.

    Hydra's own questions (`--help`, `--cfg job`, `--info`) are answered without a run.
    """
    try:
        config = _config_from_command_line(config_dir)
    except ConfigurationRefused as refused:
        if is_first_rank():
            print(refused.report(), file=sys.stderr)
        return ExitCode.REFUSED
    return ExitCode.OK if config is None else run(config)


def _config_from_command_line(config_dir: Path) -> TrainRlConfig | None:
    arguments = sys.argv[1:]
    _refuse_multirun(arguments)
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    if refused := list(check_hydra_keys(overrides)):
        raise ConfigurationRefused(refused)
    register()
    captured: list[tuple[DictConfig, dict[str, str | None]]] = []

    @hydra.main(config_path=str(config_dir), config_name="train_rl", version_base="1.3")
    def capture(composed: DictConfig) -> None:
        captured.append((composed, dict(HydraConfig.get().runtime.choices)))

    try:
        with _errors_raised():
            capture()
    except Exception as error:  # Hydra raises its own, OmegaConf's and plain ValueErrors for bad overrides
        raise ConfigurationRefused([as_refusal(error, overrides)]) from error
    if not captured:
        return None
    composed, choices = captured[0]
    return typed_config(composed, choices, LaunchFacts.from_environment(os.environ), overrides)


def _refuse_multirun(arguments: Sequence[str]) -> None:
    # argparse takes any beginning of an option's name that fits no other.
    given = next((a for a in arguments if a == "-m" or (a.startswith("--m") and "--multirun".startswith(a))), None)
    if given is not None:
        rule = "One torchrun is one run: ranks and engines cannot be shared by a sweep"
        raise ConfigurationRefused([Refusal(given, "", rule, "Loop over the values in the shell, one torchrun each")])


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Let Hydra raise instead of printing a report of its own and exiting with 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
