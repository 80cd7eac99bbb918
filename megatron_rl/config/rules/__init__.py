"""Rules across values, each as the key that is wrong, the rule and the remedy; some look at files
and host names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter

from megatron_rl.config.rules.grid import check_grid, check_split
from megatron_rl.config.rules.machine import (
    check_engine,
    check_fit,
    check_ranks,
    check_run,
    check_spec,
)
from megatron_rl.config.rules.method import (
    check_data,
    check_environment,
    check_method,
    check_pass_rates,
    check_replay,
)
from megatron_rl.config.rules.recompute import check_recompute, check_recomputed
from megatron_rl.config.rules.state import check_mode, check_resume, check_unread
from megatron_rl.config.rules.zero_variance import check_credit, check_selection
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import Refusal
from megatron_rl.models.checkpoint_inspection import inspect_checkpoint
from megatron_rl.models.limits import LIMITED, limits_of
from sglang_bridge.settings import device_of


def broken_rules(c: Configuration, facts: LaunchFacts, given: Collection[str]) -> Iterator[Refusal]:
    """Every rule that the configuration breaks on this machine. given: keys of the command line."""
    shape, problems = inspect_checkpoint(c.model.path, weights=c.model.init == "checkpoint")
    broken = [("model.path", problem.rule, problem.remedy) for problem in problems]
    broken += [*check_method(c), *check_data(c, given), *check_environment(c), *check_mode(c)]
    broken += [
        *check_selection(c, given),
        *check_credit(c),
        *check_spec(c.model, facts),
        *check_resume(c),
    ]
    broken += [
        *check_engine(c.engine, facts),
        *check_grid(c.parallel, facts),
        *check_ranks(c),
        *check_run(c.run),
        *check_pass_rates(c),
        *check_replay(c),
        *check_recompute(c.model, facts),
    ]
    if shape is not None:
        broken += [*check_split(c.parallel, c.engine, shape), *check_fit(c, shape, facts)]
        broken += check_recomputed(c.model, shape)
        on_cpu = c.mode != "train_only" and device_of(c.engine, facts.num_gpus) == "cpu"
        broken += limits_of(
            shape, {key: attrgetter(key)(c) for key in LIMITED}, engine_on_cpu=on_cpu
        )
    if c.mode == "train_only":  # starts no engine
        broken = [
            (key, rule, remedy) for key, rule, remedy in broken if not key.startswith("engine.")
        ]
    for key, rule, remedy in (*broken, *check_unread(c, given)):
        yield Refusal(key, attrgetter(key)(c), rule, remedy)
