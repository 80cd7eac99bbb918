"""Opens user-defined classes first, so that a broken one fails before engines start.

Sources and scorers are opened when the data is read.
"""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.schema import Configuration
from megatron_rl.environments.environment import open_chat_turns, open_environment
from megatron_rl.losses import open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer


def user_class_names(c: Configuration) -> list[str]:
    """Return the user-defined classes that `require_user_classes` opens."""
    names = (c.environment.name, c.algo.name)
    return [name for name in names if ":" in name]


def require_user_classes(c: Configuration) -> None:
    """Open a user-defined environment and loss, and discard them.

    Raises `PluginError`, and `Failure` if the environment adds messages of a chat that
    the model's chat template cannot append.
    """
    if ":" in c.environment.name:
        environment = open_environment(c.environment)
        path = Path(c.model.path)
        open_chat_turns(environment, path, Tokenizer.from_directory(path))
    if isinstance(c.algo, CustomAlgoSettings):
        open_loss(c.algo, read_shape(c.model.path))
