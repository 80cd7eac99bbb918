"""The scorer and the environment of a collector.

User-defined ones and verifiers are in processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from megatron_rl.config.schema import EnvironmentSettings, RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.environments.environment import (
    Environment,
    for_evaluation,
    open_environment,
)
from megatron_rl.rewards import ScorerInThisProcess, open_scorer
from megatron_rl.rewards.parts import Part, ScorerOfParts
from megatron_rl.rewards.remote import RemoteScorer
from megatron_rl.rewards.runner import ScorerCalls
from megatron_rl.rewards.user_calls import Ending, Outcome
from megatron_rl.rollouts.user_process.attempts import EpisodeAttempt, ScoreAttempt
from megatron_rl.rollouts.user_process.messages import OpenClass
from megatron_rl.rollouts.user_process.remote_class import RemoteClass
from megatron_rl.rollouts.wire.messages import Configure, FromCollector, Problem

# From the cancellation of a call until it counts as a call that goes on
_GRACE_SECONDS = 5.0

OpenAttempt = Callable[[], EpisodeAttempt]


class EnvironmentCalls(Protocol):
    """Calls of one environment: in this process, or in another one."""

    async def play(
        self, open_attempt: OpenAttempt, *, is_evaluation: bool, subject: str
    ) -> Outcome[None]:
        """Play an episode of `open_attempt`, or several one after the other until one ends.

        subject: names the rollout in warnings.
        """
        ...


class EnvironmentInThisProcess:
    """Calls an environment of this project, which cannot block or ignore its cancellation.

    Cancelling a call cancels the environment.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def play(
        self, open_attempt: OpenAttempt, *, is_evaluation: bool, subject: str
    ) -> Outcome[None]:
        environment = for_evaluation(self._environment) if is_evaluation else self._environment
        try:
            await environment.play(open_attempt().episode)
        except Exception as error:
            return Outcome(Ending.RAISED, error=error)
        return Outcome(Ending.RETURNED)


class EnvironmentInProcess:
    """Calls a user-defined environment. Its episodes may begin several times."""

    def __init__(self, remote_class: RemoteClass) -> None:
        self._remote_class = remote_class

    async def play(
        self, open_attempt: OpenAttempt, *, is_evaluation: bool, subject: str
    ) -> Outcome[None]:
        return await self._remote_class.run(open_attempt, subject=subject)


class ScorerInProcess:
    """Calls a scorer that may be open in several processes.

    A call goes to the one that makes the fewest calls. one_at_a_time: of the calls in a process.
    Further ones wait here, so that the time of a call begins when a process makes it.
    """

    def __init__(self, *remote_classes: RemoteClass, one_at_a_time: bool = False) -> None:
        self._remote_classes = remote_classes
        self._turns: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if one_at_a_time:
            self._turns = asyncio.Semaphore(len(remote_classes))

    async def score(
        self, prompt: Prompt, text: str, finish_reason: FinishReason, *, subject: str
    ) -> Outcome[Verdict]:
        """Score one response. Cancelling this cancels the scorer."""

        def open_attempt() -> ScoreAttempt:
            return ScoreAttempt(prompt, text, finish_reason)

        async with self._turns:
            remote_class = min(self._remote_classes, key=lambda remote: remote.num_calls)
            return await remote_class.run(open_attempt, subject=subject)


class UserClasses:
    """The scorer and the environment of a collector.

    chat_roles: roles of the messages that a user-defined environment adds. Others add none.
    report: sends a message to rank 0.

    Blocks until both are constructed. Raises `PluginError`.
    """

    def __init__(
        self, configuration: Configure, report: Callable[[FromCollector], Awaitable[None]]
    ) -> None:
        self._configuration = configuration
        self._report = report
        self._remote_classes: list[RemoteClass] = []
        self._remote_scorers: list[RemoteScorer] = []
        self._tasks: set[asyncio.Future[None]] = set()
        try:
            scorer = self._start_scorers(configuration.reward)
            environment = self._start_environment(configuration.environment)
            self.chat_roles = self._wait_until_open()
        except BaseException:
            for remote_class in self._remote_classes:
                remote_class.end_now()
            raise
        self.scorer = scorer
        self.environment = environment

    async def close(self) -> None:
        """End the processes, and close the connections to servers."""
        await asyncio.gather(*(scorer.close() for scorer in self._remote_scorers), *self._tasks)
        await asyncio.gather(*(remote_class.close() for remote_class in self._remote_classes))

    def _start_scorers(self, settings: RewardSettings) -> ScorerCalls:
        if settings.name != "parts":
            return self._start_scorer(settings, "reward.name")
        parts = []
        for name, part in settings.parts.items():
            calls = self._start_scorer(settings.of_part(name), f"reward.parts.{name}.name")
            parts.append(Part(name, part, calls))
        return ScorerOfParts(parts)

    def _start_scorer(self, settings: RewardSettings, key: str) -> ScorerCalls:
        if settings.name == "exact_match":
            return ScorerInThisProcess(open_scorer(settings), timeout_s=settings.timeout_s)
        if settings.name == "remote":
            return self._start_remote_scorer(settings, key)
        name = f"{key}={settings.name}"
        processes = [self._start(name, reward=settings) for _ in range(settings.processes)]
        # A verifier has one worker
        return ScorerInProcess(*processes, one_at_a_time=":" not in settings.name)

    def _start_remote_scorer(self, settings: RewardSettings, key: str) -> ScorerCalls:
        scorer = open_scorer(settings, key)
        assert isinstance(scorer, RemoteScorer)

        def warn(text: str) -> None:
            task = asyncio.ensure_future(self._report(Problem(text)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        scorer.prepare(timeout_s=settings.timeout_s, warn=warn)
        self._remote_scorers.append(scorer)
        # It limits its requests itself: a response may wait for its turn
        return ScorerInThisProcess(scorer, timeout_s=None)

    def _start_environment(self, settings: EnvironmentSettings) -> EnvironmentCalls:
        if ":" not in settings.name:
            return EnvironmentInThisProcess(open_environment(settings))
        name = f"environment.name={settings.name}"
        return EnvironmentInProcess(self._start(name, environment=settings))

    def _wait_until_open(self) -> tuple[str, ...]:
        """Wait for all processes, and return the roles of a user-defined environment."""
        roles = [remote_class.wait_until_open() for remote_class in self._remote_classes]
        return tuple(role for names in roles for role in names)

    def _start(self, name: str, **section: Any) -> RemoteClass:
        async def warn(text: str) -> None:
            await self._report(Problem(text))

        settings = OpenClass(search_path=tuple(sys.path), grace_s=_GRACE_SECONDS, **section)
        remote_class = RemoteClass(
            name, settings, open_timeout_s=self._configuration.open_timeout_s, report=warn
        )
        self._remote_classes.append(remote_class)
        return remote_class
