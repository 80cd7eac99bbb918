"""Interface of environments, the simplest one, and the function that opens one."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.plugins import PluginError, load_plugin
from megatron_rl.environments.calculator import Calculator
from megatron_rl.environments.chat_turns import ChatTurns
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.environments.episode import Episode
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import Tokenizer


class Environment(Protocol):
    """Decides what happens in an episode. A user-defined environment needs the method `play`.

    It may inherit from this class. It runs in a process of its own beside the collector. Many
    calls of `play` run there at the same time in one event loop: keep the state of an episode in
    local variables, and move blocking work to a thread or a child process.

    If it adds messages of a chat with `episode.observe_messages`, the class names their roles, such
    as `chat_roles = ("tool",)`.

    `environment.timeout_s` cancels a call that takes too long between two responses. Let it end
    then. A process that answers nothing for the timeout and 6 seconds is killed and replaced, and
    the episodes that ran in it begin again (docs/faults.md).
    """

    @abstractmethod
    async def play(self, episode: Episode) -> None:
        """Play one episode to its end.

        Any exception rejects the rollout. Rejected rollouts are counted and not trained.
        """
        ...


class SingleTurn:
    """The model responds once."""

    async def play(self, episode: Episode) -> None:
        await episode.respond()


def is_replayable(settings: EnvironmentSettings) -> bool:
    """Return True for an environment that does the same again with the same responses.

    Its episodes can be stored as their responses. Nothing is known about user-defined ones.
    """
    return ":" not in settings.name


def open_environment(settings: EnvironmentSettings) -> Environment:
    """Open the environment that `environment.name` chooses.

    `single_turn`, `demonstration`, `calculator`, or `package.module:Name` for a user-defined one.
    Raises `PluginError`.
    """
    if settings.name == "single_turn":
        return SingleTurn()
    if settings.name == "demonstration":
        return Demonstration(with_calls=settings.options.get("tool") == "calculator")
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

    Raises `Failure` if the model's chat template cannot append them, and `PluginError`
    for `chat_roles` that are no roles.
    """
    return open_role_turns(read_chat_roles(environment), model_path, tokenizer)


def open_role_turns(
    roles: Sequence[str], model_path: Path, tokenizer: Tokenizer
) -> ChatTurns | None:
    """Open the renderer of messages of these roles, None without roles.

    Raises `Failure`.
    """
    return ChatTurns(ChatTemplate(model_path), tokenizer, roles) if roles else None


def read_chat_roles(environment: Environment) -> tuple[str, ...]:
    """Return the roles of an environment's messages. Raises `PluginError` for other values."""
    roles = getattr(environment, "chat_roles", ())
    try:
        is_valid = not isinstance(roles, str) and all(isinstance(role, str) for role in roles)
    except TypeError:
        is_valid = False
    if not is_valid:
        raise PluginError(
            f"environment.name: chat_roles={roles!r} must be a tuple of roles, such as ('tool',)"
        )
    return tuple(roles)


def for_evaluation(environment: Environment) -> Environment:
    """Return the environment for held-out questions, where demonstrations measure nothing."""
    if isinstance(environment, Demonstration):
        return Calculator() if environment.with_calls else SingleTurn()
    return environment
