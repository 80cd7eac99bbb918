"""Environments: an environment plays one episode for each rollout of a prompt.

Built-in ones run in a node's collector, user-defined ones in a process of their own.
"""

from megatron_rl.environments.environment import Environment, open_environment
from megatron_rl.environments.episode import Episode, Response

__all__ = ["Environment", "Episode", "Response", "open_environment"]
