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
    if c.sync.delta and c.sync.transport != "disk":
        rule = f"Changes travel in files, and sync.transport={c.sync.transport} sends all weights"
        yield BrokenRule("sync.delta", rule, "Use sync.transport=disk, or sync.delta=false")
    elif c.sync.delta and c.engine.mode == "external":
        rule = (
            "The run has no process on the nodes of external engines, so nothing there could "
            "rebuild the weights"
        )
        yield BrokenRule("sync.delta", rule, "Use sync.delta=false, or engine=managed")
    elif c.sync.delta and c.engine.nodes_per_engine > 1:
        rule = (
            "Weights are rebuilt on the node that leads an engine, and with "
            f"engine.nodes_per_engine={c.engine.nodes_per_engine} the others would not find them"
        )
        yield BrokenRule("sync.delta", rule, "Use sync.delta=false")
    if c.sync.local_directory is not None and not c.sync.delta:
        rule = "This has no effect: only sync.delta=true keeps copies of the weights on nodes"
        yield BrokenRule("sync.local_directory", rule, "Remove it, or use sync.delta=true")
