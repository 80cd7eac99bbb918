"""Rules of the outputs of a run besides its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration


def check_logger(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about trackers and profiles."""
    logger = c.logger
    if logger.wandb is not None and find_spec("wandb") is None:
        rule = "The package wandb is not installed"
        yield BrokenRule(
            "logger.wandb", rule, "Install it with pip install wandb, or remove the key"
        )
    if logger.prometheus is not None and not _has_valid_port(logger.prometheus):
        rule = "Ports are numbers from 1 to 65535"
        yield BrokenRule("logger.prometheus", rule, "Give a free one, such as 9400")
    yield from _check_profiles(c)


def _has_valid_port(address: str) -> bool:
    return 1 <= int(address.rpartition(":")[2]) <= 65535


def _check_profiles(c: Configuration) -> Iterator[BrokenRule]:
    logger = c.logger
    last_step = c.train.total_steps
    if any(step > last_step for step in logger.profile_steps):
        rule = f"The run ends after train.total_steps={last_step}"
        yield BrokenRule("logger.profile_steps", rule, "Name earlier steps")
    if logger.profile_steps and (c.is_measurement or c.mode == "rollout_only"):
        rule = f"mode={c.mode} has no training steps"
        yield BrokenRule("logger.profile_steps", rule, "Remove it")
