"""Rules of sampling ahead, and of the transport of weights."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration

_KEY = "rollout.max_staleness"


def check_staleness(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about `rollout.max_staleness` above 0."""
    yield from _check_on_update(c)
    staleness = c.rollout.max_staleness
    if not staleness:
        return
    remedy = f"Use {_KEY}=0"
    if c.mode != "train":
        rule = f"Only mode=train samples rollouts ahead of the trainer, and mode={c.mode}"
        yield BrokenRule(_KEY, rule, remedy)
    elif c.environment.name == "demonstration":
        rule = "No engine samples worked responses, so there is nothing to sample ahead"
        yield BrokenRule(_KEY, rule, f"{remedy}, or another environment")
    if staleness >= c.train.total_steps:
        rule = f"Rollouts cannot be older than the run, and train.total_steps={c.train.total_steps}"
        yield BrokenRule(_KEY, rule, "Give less, 1 for one step ahead")


def _check_on_update(c: Configuration) -> Iterator[BrokenRule]:
    rollout = c.rollout
    key = "rollout.on_update"
    if rollout.on_update == "wait":
        return
    if not rollout.max_staleness:
        rule = f"A response with tokens of two versions is older than {_KEY}=0 allows"
        yield BrokenRule(key, rule, f"Use {_KEY}=1 or more, or {key}=wait")
    if c.selection.name != "uniform":
        rule = (
            f"selection={c.selection.name} chooses prompts by rollouts that are not there yet "
            "when several steps are open"
        )
        yield BrokenRule(key, rule, f"Use {key}=wait, or selection=uniform")


def check_sync(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about the way of weights."""
    if c.sync.engines_per_tree > 1 and c.sync.transport != "distributed":
        rule = f"With sync.transport={c.sync.transport}, each engine loads weights by itself"
        remedy = "Use sync.engines_per_tree=1, or sync.transport=distributed"
        yield BrokenRule("sync.engines_per_tree", rule, remedy)
    if c.sync.transport != "delta":
        return
    if c.engine.mode == "external":
        rule = (
            "The run has no process on the nodes of external engines, so nothing there could "
            "rebuild the weights"
        )
        yield BrokenRule("sync.transport", rule, "Use sync.transport=disk, or engine=managed")
    elif c.engine.nodes_per_engine > 1:
        rule = (
            "Weights are rebuilt on the node that leads an engine, and with "
            f"engine.nodes_per_engine={c.engine.nodes_per_engine} the others would not find them"
        )
        yield BrokenRule("sync.transport", rule, "Use sync.transport=disk")
