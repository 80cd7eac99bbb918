"""The interface of everything that plays a prompt, and how one is opened."""

from __future__ import annotations

import inspect
from typing import Protocol

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.plugins import PluginError, load_plugin
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.environments.episode import Episode
from megatron_rl.environments.single_turn import SingleTurn


class Environment(Protocol):
    """Decides what happens with one prompt. One of the user's own may inherit this class or only
    have its method.

    Many calls of `play` are under way at once, in one event loop: what belongs to one episode is
    kept in the call, and work that blocks goes to a thread or a child process.
    """

    async def play(self, episode: Episode) -> None:
        """Play one episode to its end.

        Any exception rejects that rollout; it is counted and not trained.
        """
        ...


def open_environment(settings: EnvironmentSettings) -> Environment:
    """`single_turn`, `demonstration`, or the user's own behind
    `environment.name=package.module:Name`. Raises `PluginError`.
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
            f"environment.name={settings.name}: `play` is an ordinary function. Write `async def play`"
        )
    return environment


def for_evaluation(environment: Environment) -> Environment:
    """What held-out questions are played in: worked responses would measure nothing."""
    return SingleTurn() if isinstance(environment, Demonstration) else environment
