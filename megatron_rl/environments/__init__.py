"""What happens with one prompt: turns of the engine, and of whoever answers it."""

from megatron_rl.environments.environment import Environment, open_environment
from megatron_rl.environments.episode import Episode, Response

__all__ = ["Environment", "Episode", "Response", "open_environment"]
