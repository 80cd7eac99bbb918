"""Interface of environments, and the function that opens one."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from pathlib import Path
from typing import Protocol

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.plugins import PluginError, load_plugin
from megatron_rl.environments.calculator import Calculator
from megatron_rl.environments.chat_turns import ChatTurns
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.environments.episode import Episode
from megatron_rl.environments.single_turn import SingleTurn
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import Tokenizer


class Environment(Protocol):
    """Decides what happens in an episode. A user-defined environment needs the method `play`.

    It may inherit from this class. Many calls of `play` run at the same time in one event loop:
    keep the state of an episode in local variables, and move blocking work to a thread or a child
    process.

    If it adds messages of a chat with `episode.observe_messages`, the class names their roles, such
    as `chat_roles = ("tool",)`.

    `environment.timeout_s` cancels a call that takes too long between two responses. Let it end
    then: a call that goes on is abandoned, and too many of them end the run
    (`rollout.max_abandoned_calls`).
    """

    @abstractmethod
    async def play(self, episode: Episode) -> None:
        """Play one episode to its end.

        Any exception rejects the rollout. Rejected rollouts are counted and not trained.
        """
        ...


def open_environment(settings: EnvironmentSettings) -> Environment:
    """Open the environment that `environment.name` chooses.

    `single_turn`, `demonstration`, `calculator`, or `package.module:Name` for a user-defined one.
    Raises `PluginError`.
    """
    if settings.name == "single_turn":
        return SingleTurn()
    if settings.name == "demonstration":
        return Demonstration(with_calls=settings.tool == "calculator")
    if settings.name == "calculator":
        return Calculator()
    methods = {"play": ("episode",)}
    environment: Environment = load_plugin(
        "environment.name", settings.name, settings.options, methods=methods
    )
    if not inspect.iscoroutinefunction(environment.play):
        raise PluginError(
            f"environment.name={settings.name}: `play` is not asynchronous. Write `async def play`"
        )
    return environment


def open_chat_turns(
    environment: Environment, model_path: Path, tokenizer: Tokenizer
) -> ChatTurns | None:
    """Open the renderer of an environment's messages, None if it adds none.

    Raises `TemplateRerenders` if the model's chat template cannot append them, and `PluginError`
    for `chat_roles` that are no roles.
    """
    roles = getattr(environment, "chat_roles", ())
    if isinstance(roles, str) or not all(isinstance(role, str) for role in roles):
        raise PluginError(
            f"environment.name: chat_roles={roles!r} must be a tuple of roles, such as ('tool',)"
        )
    return ChatTurns(ChatTemplate(model_path), tokenizer, roles) if roles else None


def for_evaluation(environment: Environment) -> Environment:
    """Return the environment for held-out questions, where demonstrations measure nothing."""
    if isinstance(environment, Demonstration):
        return Calculator() if environment.with_calls else SingleTurn()
    return environment
