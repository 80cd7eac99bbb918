"""Rules across keys. Some of them read files, look up addresses or check what is installed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.rules.colocated import check_colocated
from megatron_rl.config.rules.data import check_data, check_pass_rates
from megatron_rl.config.rules.evaluation import check_evaluation
from megatron_rl.config.rules.grid import check_grid, check_split
from megatron_rl.config.rules.guard import check_guard
from megatron_rl.config.rules.logger import check_logger
from megatron_rl.config.rules.machine import (
    check_engine,
    check_formats_and_timeouts,
    check_layer_spec,
    check_run,
    check_sequence_length,
)
from megatron_rl.config.rules.method import (
    check_environment,
    check_method,
    check_replay,
)
from megatron_rl.config.rules.quantization import check_blocks, check_quantization
from megatron_rl.config.rules.recompute import check_recompute, check_recomputed_modules
from megatron_rl.config.rules.regularization import check_regularization
from megatron_rl.config.rules.reward import check_reward
from megatron_rl.config.rules.staleness import check_staleness, check_sync
from megatron_rl.config.rules.state import check_mode, check_resume, check_unread_keys
from megatron_rl.config.rules.zero_variance import (
    check_credit,
    check_selection,
    check_stop_repetition,
)
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import Refusal
from megatron_rl.models.hf_checkpoint.inspection import inspect_checkpoint
from megatron_rl.models.limits import LIMITED_KEYS, model_limits
from megatron_rl.models.shape import ModelShape
from sglang_bridge.settings import server_device


def broken_rules(c: Configuration, facts: LaunchFacts, keys: Collection[str]) -> Iterator[Refusal]:
    """Yield a refusal for every rule that the configuration breaks on this machine.

    keys: keys that the command line sets.
    """
    for key, rule, remedy in _broken_rules(c, facts, keys):
        yield Refusal(key, _value_of(c, key), rule, remedy)


def _value_of(c: Configuration, key: str) -> Any:
    """Return the value of a key. Those of a source are in the mapping data.sources."""
    for section, entries in (("data.sources", c.data.sources), ("reward.parts", c.reward.parts)):
        if key.startswith(f"{section}."):
            name, _, inner = key.removeprefix(f"{section}.").partition(".")
            return getattr(entries[name], inner)
    return attrgetter(key)(c)


def _broken_rules(
    c: Configuration, facts: LaunchFacts, keys: Collection[str]
) -> Iterator[BrokenRule]:
    shape, problems = inspect_checkpoint(c.model.path, weights=c.model.init == "checkpoint")
    for problem in problems:
        yield BrokenRule("model.path", problem.rule, problem.remedy)
    for result in (*_check_settings(c, facts, keys), *_check_model(c, facts, shape)):
        if c.has_engines or not result.key.startswith("engine."):
            yield result
    yield from check_unread_keys(c, keys)


def _check_settings(
    c: Configuration, facts: LaunchFacts, keys: Collection[str]
) -> Iterator[BrokenRule]:
    yield from check_method(c)
    yield from check_staleness(c)
    yield from check_data(c, keys)
    yield from check_environment(c)
    yield from check_reward(c)
    yield from check_mode(c)
    yield from check_guard(c)
    yield from check_evaluation(c)
    yield from check_selection(c, keys)
    yield from check_credit(c)
    yield from check_stop_repetition(c, keys)
    yield from check_layer_spec(c.model, facts)
    yield from check_resume(c)
    yield from check_engine(c.engine, facts)
    yield from check_quantization(c)
    yield from check_sync(c)
    yield from check_colocated(c, facts)
    yield from check_grid(c.parallel, facts)
    yield from check_formats_and_timeouts(c)
    yield from check_run(c.run)
    yield from check_pass_rates(c)
    yield from check_replay(c)
    yield from check_regularization(c)
    yield from check_recompute(c.model, facts)
    yield from check_logger(c)


def _check_model(
    c: Configuration, facts: LaunchFacts, shape: ModelShape | None
) -> Iterator[BrokenRule]:
    """Yield the rules that depend on the model's shape; none if the shape cannot be read."""
    if shape is None:
        return
    yield from check_split(c.parallel, c.engine, shape)
    yield from check_blocks(c.engine, shape, facts)
    yield from check_sequence_length(c, shape, facts)
    yield from check_recomputed_modules(c.model, shape)
    has_cpu_engine = c.has_engines and server_device(facts.num_gpus) == "cpu"
    settings = {key: attrgetter(key)(c) for key in LIMITED_KEYS}
    limits = model_limits(shape, settings, has_engines=c.has_engines, engine_on_cpu=has_cpu_engine)
    for limit in limits:
        yield BrokenRule(*limit)
