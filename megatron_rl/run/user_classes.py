"""Classes of the user's own, opened before anything is started: what does not open costs no engine
and no directory.
"""

from __future__ import annotations

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.schema import Configuration
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.prompts.factory import draw_questions
from megatron_rl.rewards import open_scorer


def named(c: Configuration) -> list[str]:
    """The classes of the user's own that a configuration names."""
    return [
        name
        for name in (c.reward.name, c.data.source, c.environment.name, c.algo.name)
        if ":" in name
    ]


def require_user_classes(c: Configuration) -> None:
    """Open each of them, draw the source's first question, and leave them.

    Raises `PluginError`, `PromptDataError`.
    """
    if ":" in c.reward.name:
        open_scorer(c.reward)
    if ":" in c.environment.name:
        open_environment(c.environment)
    if isinstance(c.algo, CustomAlgoSettings):
        open_loss(c.algo, read_shape(c.model.path))
    if ":" in c.data.source:
        next(draw_questions(c.data), None)
