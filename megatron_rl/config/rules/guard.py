"""Rules of the reactions to loss spikes, collapsing entropy and NaN."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration, GuardSettings


def check_guard(c: Configuration, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield broken rules about keys of `guard`. keys: those that the command line sets."""
    yield from _check_effect(c.guard, keys)
    if c.guard.entropy != "off" and c.guard.min_entropy is None:
        rule = f"guard.entropy={c.guard.entropy} compares the entropy with it"
        remedy = "Give the nats per token: policy/entropy in metrics.jsonl shows what is usual"
        yield BrokenRule("guard.min_entropy", rule, remedy)
    if c.guard.bf16_mismatch is not None and c.engine.quantization is None:
        rule = "This setting has no effect: engines are not quantized"
        remedy = "Remove it, or use engine.quantization=fp8"
        yield BrokenRule("guard.bf16_mismatch", rule, remedy)
    for key in c.guard.rollback_keys:
        yield from _check_rollback(c, key)


def _check_effect(guard: GuardSettings, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield a broken rule for each key of the command line that no guard reads."""
    has_spikes = guard.spike != "off"
    has_entropy = guard.entropy != "off"
    has_rollbacks = bool(guard.rollback_keys)
    uses = (
        ("spike_factor", has_spikes, "guard.spike=skip, rollback or stop"),
        ("window", has_spikes, "guard.spike=skip, rollback or stop"),
        ("max_skips", guard.spike == "skip", "guard.spike=skip"),
        ("min_entropy", has_entropy, "guard.entropy=rollback or stop"),
        ("patience", has_entropy, "guard.entropy=rollback or stop"),
        ("max_rollbacks", has_rollbacks, "rollback for guard.spike, entropy or nonfinite"),
        ("rollback_window", has_rollbacks, "rollback for guard.spike, entropy or nonfinite"),
    )
    for name, is_used, remedy in uses:
        if f"guard.{name}" in keys and not is_used and getattr(guard, name) is not None:
            rule = "This setting has no effect"
            yield BrokenRule(f"guard.{name}", rule, f"Remove it, or use {remedy}")


def _check_rollback(c: Configuration, key: str) -> Iterator[BrokenRule]:
    """Yield broken rules about the checkpoints that a rollback needs."""
    if not c.run.checkpoint_every:
        rule = "A rollback loads a checkpoint, and run.checkpoint_every=0 saves none"
        action = "stop" if key == "guard.entropy" else "skip"
        yield BrokenRule(key, rule, f"Give run.checkpoint_every=N, or use {key}={action}")
        return
    # The steps between the first suspicious step and the rollback
    streaks = {"guard.entropy": "guard.patience", "guard.nonfinite": "train.max_nonfinite_steps"}
    streak_key = streaks.get(key)
    if streak_key is None:
        return
    streak = attrgetter(streak_key)(c)
    needed_steps = streak if key == "guard.entropy" else streak - 1
    kept_steps = (c.run.keep_checkpoints - 1) * c.run.checkpoint_every
    if kept_steps < needed_steps:
        num_needed = 1 + -(-needed_steps // c.run.checkpoint_every)
        rule = (
            f"{key}=rollback acts {streak_key}={streak} steps after the trouble began. Every "
            "checkpoint that is kept may be newer"
        )
        yield BrokenRule("run.keep_checkpoints", rule, f"Give at least {num_needed}")
