"""Rules of the reactions to loss spikes, collapsing entropy and NaN."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import LOW_ENTROPY_STEPS, Configuration


def check_guard(c: Configuration) -> Iterator[BrokenRule]:
    """Yield a broken rule if every checkpoint may be from the time of low entropy."""
    every = c.run.checkpoint_every
    if c.guard.min_entropy is None or not every:
        return
    # The policy from before the first of these steps has low entropy, too
    if (c.run.keep_checkpoints - 1) * every < LOW_ENTROPY_STEPS:
        num_needed = 1 + -(-LOW_ENTROPY_STEPS // every)
        rule = (
            f"guard.min_entropy={c.guard.min_entropy:g} acts {LOW_ENTROPY_STEPS} steps after the "
            "entropy has collapsed. Every checkpoint that is kept may be newer"
        )
        yield BrokenRule("run.keep_checkpoints", rule, f"Give at least {num_needed}")
