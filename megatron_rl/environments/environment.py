"""Interface of environments, and the function that opens one."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Protocol

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.plugins import PluginError, load_plugin
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.environments.episode import Episode
from megatron_rl.environments.single_turn import SingleTurn


class Environment(Protocol):
    """Decides what happens in an episode. A user-defined environment needs the method `play`.

    It may inherit from this class. Many calls of `play` run at the same time in one event loop:
    keep the state of an episode in local variables, and move blocking work to a thread or a child
    process.

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

    `single_turn`, `demonstration`, or `package.module:Name` for a user-defined one.
    Raises `PluginError`.
    """
    if settings.name == "single_turn":
        return SingleTurn()
    if settings.name == "demonstration":
        return Demonstration()
    methods = {"play": ("episode",)}
    environment: Environment = load_plugin(
        "environment.name", settings.name, settings.options, methods=methods
    )
    if not inspect.iscoroutinefunction(environment.play):
        raise PluginError(
            f"environment.name={settings.name}: `play` is not asynchronous. Write `async def play`"
        )
    return environment


def for_evaluation(environment: Environment) -> Environment:
    """Return the environment for held-out questions, where demonstrations measure nothing."""
    return SingleTurn() if isinstance(environment, Demonstration) else environment
