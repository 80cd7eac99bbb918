"""Rules about the transport of weights."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration


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
