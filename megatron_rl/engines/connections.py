"""Rank 0's connections to the engines and collectors of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.contracts.commands import Command
from megatron_rl.contracts.group import Group
from megatron_rl.engines.fleet import Fleet
from megatron_rl.engines.time_to_store import TimeToStore
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.rollouts.queue import HoldTimedOut, RolloutQueue
from megatron_rl.rollouts.steps.steps_ahead import SecondsToStop
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.weights.calls import call_each

# An engine that hangs must not take the time of others. It is asked again.
_ABORT_SECONDS = 0.5
_HOLD_SECONDS = 600.0
_HOLD_FOR_SAVE_SECONDS = 10.0
_STORE_SECONDS = 60.0


@dataclass(frozen=True)
class StoredPartials:
    """The state of all requests, in the memory of collectors.

    num_new_tokens: tokens that collectors have received since the last hold.
    """

    groups: tuple[Group, ...]
    num_new_tokens: int


@dataclass(frozen=True)
class EngineConnections:
    """Rank 0's connections: `queue` takes requests for rollouts, `weights` sends weights.

    fleet: decides which engines serve. open_admin: opens the control client of an engine.
    sends_weights: False where engines serve the weights that they have loaded themselves.
    token_counter: compares the engines' counts of tokens with the run's.
    """

    queue: RolloutQueue
    weights: WeightSync
    fleet: Fleet
    open_admin: Callable[[Engine], AdminClient]
    token_counter: TokenCounter
    sends_weights: bool = True

    def set_version(self, version: int) -> None:
        """Use the engines that hold these weights now, and no response of others."""
        self.queue.set_version(version)
        self.fleet.announce()

    def refresh(self) -> None:
        """Take in which engines have failed, and which may join with the next sync."""
        self.fleet.refresh()

    def release(self, group_ids: Sequence[str]) -> None:
        """Free the rollouts of delivered groups."""
        self.queue.drop(group_ids)

    def send_waiting(self) -> None:
        """Send engines all requests that wait for one."""
        self.queue.send_waiting()

    def count_in_flight(self) -> int:
        """Return the number of rollouts to train on whose group has not arrived."""
        return self.queue.count_in_flight()

    def engines_idle_seconds(self) -> float:
        """Return the seconds in which engines were idle since the last call."""
        return self.queue.engines_idle_seconds()

    def can_sample(self) -> bool:
        """Return False while no engine serves. A collector that is gone comes back."""
        return bool(self.fleet.members.serving)

    def stop(self) -> None:
        """End every collector."""
        self.queue.stop()

    def interrupt(self, idle: Callable[[], None]) -> int:
        """Stop all responses in the middle, until `proceed`. Raises `HoldTimedOut`.

        Returns the tokens that collectors have received since the last hold.

        idle: called about every half second.
        """
        return self.queue.hold(abort=self._abort_all, idle=idle, timeout_seconds=_HOLD_SECONDS)

    def store_partials(
        self, idle: Callable[[], None], seconds_to_stop: SecondsToStop
    ) -> StoredPartials:
        """Stop all responses, store their sampled parts until `release_partials`, and go on.

        Of a response that an engine does not give back, what it has sampled since its last
        interruption is not stored: a resumed run samples that again. The result lacks groups that
        a collector has not stored after a minute. If the run has to stop, both have less time.

        idle: called about every half second.
        """
        time_to_store = TimeToStore(seconds_to_stop)
        num_new_tokens = 0
        with contextlib.suppress(HoldTimedOut):
            num_new_tokens = self.queue.hold(
                abort=self._abort_all,
                idle=idle,
                timeout_seconds=_HOLD_FOR_SAVE_SECONDS,
                has_to_end=time_to_store.is_over_for_engines,
            )
        groups = self.queue.store_partials(
            idle=idle, timeout_seconds=_STORE_SECONDS, has_to_end=time_to_store.is_over
        )
        self.queue.proceed()
        return StoredPartials(tuple(groups), num_new_tokens)

    def release_partials(self) -> None:
        """Free what `store_partials` has stored."""
        self.queue.release_partials()

    def proceed(self) -> None:
        """Let engines work on requests again, also on interrupted ones."""
        self.queue.proceed()

    def _abort_all(self) -> None:
        """Abort the requests of every engine. One that does not answer has failed, or will."""
        admins = [self.open_admin(member.engine) for member in self.fleet.members.serving]
        deadline = time.monotonic() + _ABORT_SECONDS
        call_each(admins, lambda admin: admin.abort_all(), deadline=deadline)

    def recover(self, run: Callable[[Command], Any]) -> None:
        """Let engines join and leave while all ranks wait for rollouts.

        run: runs a command on all ranks. Raises `NoEngineLeft`.
        """
        if not self.sends_weights:
            self.fleet.update(can_join=True)
            self.fleet.admit_without_weights()
            return
        is_current = self.weights.is_current
        self.fleet.update(can_join=is_current)
        command = self.fleet.join_command() if is_current else None
        if command is not None:
            run(command)
            self.fleet.announce()
