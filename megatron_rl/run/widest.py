"""What is sized once, at the start of a run, is sized for all of its stages."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.schema import Configuration


def widest(c: Configuration) -> Configuration:
    """With the longest responses and the largest groups of all stages."""
    rollouts = [stage.configuration.rollout for stage in phases_of(c)] or [c.rollout]
    longest, largest = (
        max(r.max_new_tokens for r in rollouts),
        max(r.samples_per_prompt for r in rollouts),
    )
    return replace(
        c, rollout=replace(c.rollout, max_new_tokens=longest, samples_per_prompt=largest)
    )
