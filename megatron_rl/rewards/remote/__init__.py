"""A scorer behind an HTTP server."""

from megatron_rl.rewards.remote.scorer import RemoteScorer

__all__ = ["RemoteScorer"]
