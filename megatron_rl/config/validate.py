"""All rules, in the order of the configuration's sections."""

from __future__ import annotations

from collections.abc import Collection

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.limits import check_limits
from megatron_rl.config.refusal import ConfigurationRefused, Refusal
from megatron_rl.config.rules.algo import check_algo
from megatron_rl.config.rules.batch import check_batch
from megatron_rl.config.rules.data import check_data
from megatron_rl.config.rules.engine import check_engine
from megatron_rl.config.rules.lengths import check_lengths
from megatron_rl.config.rules.parallel import check_grid, check_model_split
from megatron_rl.config.rules.precision import check_precision
from megatron_rl.config.rules.run import check_run
from megatron_rl.config.rules.timeouts import check_timeouts
from megatron_rl.config.schema import TrainRlConfig
from megatron_rl.models.files import inspect_model


def validate(config: TrainRlConfig, facts: LaunchFacts, given: Collection[str] = ()) -> None:
    """Raise `ConfigurationRefused` with every rule that the configuration breaks. given: keys of the command line."""
    _refuse(list(check_limits(config)))
    shape, refusals = inspect_model(config.model.path)
    refusals += check_algo(config.algo)
    refusals += check_data(config.data, given)
    refusals += check_engine(config.engine, facts)
    refusals += check_grid(config.parallel, facts)
    refusals += check_timeouts(config.engine, config.parallel, config.sync)
    refusals += check_precision(config.model, config.engine, facts)
    refusals += check_batch(config.rollout, config.train, config.data)
    refusals += check_run(config.run)
    if shape is not None:
        refusals += check_model_split(config.parallel, config.engine, shape)
        refusals += check_lengths(config.data, config.rollout, config.engine, shape)
    _refuse(refusals)


def _refuse(refusals: list[Refusal]) -> None:
    if refusals:
        raise ConfigurationRefused(refusals)
