"""Environments: an environment plays one episode for each rollout of a prompt."""

from megatron_rl.environments.environment import Environment, open_environment
from megatron_rl.environments.episode import Episode, Response

__all__ = ["Environment", "Episode", "Response", "open_environment"]
