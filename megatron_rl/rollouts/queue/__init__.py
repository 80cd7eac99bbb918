"""Rank 0: the ledger of groups, and what collectors are to do."""

from megatron_rl.rollouts.queue.queue import CollectorFailed, HoldTimedOut, RolloutQueue

__all__ = ["CollectorFailed", "HoldTimedOut", "RolloutQueue"]
