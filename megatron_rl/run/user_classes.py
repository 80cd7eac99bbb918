"""Opens user-defined classes first, so that a broken one fails before engines start."""

from __future__ import annotations

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.schema import Configuration
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.prompts.factory import generate_questions
from megatron_rl.rewards import open_scorer


def user_class_names(c: Configuration) -> list[str]:
    """Return the user-defined classes that a configuration names."""
    names = (c.reward.name, c.data.source, c.environment.name, c.algo.name)
    return [name for name in names if ":" in name]


def require_user_classes(c: Configuration) -> None:
    """Open each user-defined class, read the source's first question, and discard them.

    Raises `PluginError`, `PromptDataError`.
    """
    if ":" in c.reward.name:
        open_scorer(c.reward)
    if ":" in c.environment.name:
        open_environment(c.environment)
    if isinstance(c.algo, CustomAlgoSettings):
        open_loss(c.algo, read_shape(c.model.path))
    if ":" in c.data.source:
        next(generate_questions(c.data), None)
