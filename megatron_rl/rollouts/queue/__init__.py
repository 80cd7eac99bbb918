"""Rank 0's side of the collectors: the ledger of groups, and where requests go."""

from megatron_rl.rollouts.queue.queue import CollectorFailed, HoldTimedOut, RolloutQueue

__all__ = ["CollectorFailed", "HoldTimedOut", "RolloutQueue"]
