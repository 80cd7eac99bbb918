"""Rules of the reactions to loss spikes, collapsing entropy and NaN."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration, GuardSettings


def check_guard(c: Configuration, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield broken rules about keys of `guard`. keys: keys that the command line sets."""
    yield from _check_effect(c.guard, keys)
    if c.guard.entropy != "off" and c.guard.min_entropy is None:
        rule = f"guard.entropy={c.guard.entropy} compares the entropy with it"
        remedy = "Give the nats per token: policy/entropy in metrics.jsonl shows what is usual"
        yield BrokenRule("guard.min_entropy", rule, remedy)
    yield from _check_kept_checkpoints(c)
    if c.guard.bf16_mismatch is not None and c.engine.quantization is None:
        rule = "This setting has no effect: engines are not quantized"
        remedy = "Remove it, or use engine.quantization=fp8"
        yield BrokenRule("guard.bf16_mismatch", rule, remedy)


def _check_effect(guard: GuardSettings, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield a broken rule for each key of the command line that no guard reads."""
    has_spikes = guard.spike != "off"
    has_entropy = guard.entropy != "off"
    uses = (
        ("spike_factor", has_spikes, "guard.spike=skip or stop"),
        ("window", has_spikes, "guard.spike=skip or stop"),
        ("max_skips", guard.spike == "skip", "guard.spike=skip"),
        ("min_entropy", has_entropy, "guard.entropy=stop"),
        ("patience", has_entropy, "guard.entropy=stop"),
    )
    for name, is_used, remedy in uses:
        if f"guard.{name}" in keys and not is_used and getattr(guard, name) is not None:
            rule = "This setting has no effect"
            yield BrokenRule(f"guard.{name}", rule, f"Remove it, or use {remedy}")


def _check_kept_checkpoints(c: Configuration) -> Iterator[BrokenRule]:
    """Yield a broken rule if every checkpoint may be from the time of low entropy."""
    every = c.run.checkpoint_every
    if c.guard.entropy == "off" or not every:
        return
    # The policy from before the first of these steps has low entropy, too
    if (c.run.keep_checkpoints - 1) * every < c.guard.patience:
        num_needed = 1 + -(-c.guard.patience // every)
        rule = (
            f"guard.entropy={c.guard.entropy} acts guard.patience={c.guard.patience} steps after "
            "the entropy has collapsed. Every checkpoint that is kept may be newer"
        )
        yield BrokenRule("run.keep_checkpoints", rule, f"Give at least {num_needed}")
