"""Patience: who waits inside a collective outlasts what it waits for."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import EngineConfig, ParallelConfig, SyncConfig


def check_timeouts(engine: EngineConfig, parallel: ParallelConfig, sync: SyncConfig) -> Iterator[Refusal]:
    """Starting managed engines and one weight update each take less than `parallel.timeout_s`."""
    waits = [("sync.timeout_s", sync.timeout_s)]
    if engine.mode == "managed":
        waits.insert(0, ("engine.start_timeout_s", engine.start_timeout_s))
    for key, seconds in waits:
        if seconds >= parallel.timeout_s:
            rule = f"The other ranks wait in a collective and give up after parallel.timeout_s={parallel.timeout_s:g}"
            yield Refusal(key, seconds, rule, "Lower it, or raise parallel.timeout_s above it")
