"""The places of a run where a feature can do something."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import Command, Train
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.run.loop.trained_step import TrainedStep
from megatron_rl.training.dispatcher import CommandTable


class Observer:
    """A feature of a run. Each method does nothing unless a feature replaces it.

    Every rank calls `handlers` once, and `around` for each command. The loop of rank 0 calls the
    others. What a feature adds to `values` is in the record of the step.

    name: the name of its state in checkpoints.
    """

    name = ""

    def handlers(self) -> CommandTable:
        """Return what this rank does for commands that only this feature sends."""
        return {}

    def around(self, command: Command) -> contextlib.AbstractContextManager[None]:
        """Return a context for this rank's part of a command."""
        return contextlib.nullcontext()

    def before_step(self, step: int, parts: StepParts, *, is_under_way: bool) -> None:
        """Prepare a step, and change its parts. is_under_way: its rollouts were requested."""

    def prepare(self, command: Train) -> Train:
        """Return the command to train, with what this feature needs."""
        return command

    def after_bad_responses(self, step: int, failure: Exception) -> None:
        """Take a batch with too many NaN. step: the engines had weights from before, or newer."""

    def after_sampling(self, groups: Sequence[Group], values: dict[str, float]) -> None:
        """Take all groups of a step or an evaluation, in the order of their requests.

        Those of a step come before `after_train`. values: of an evaluation, nobody reads them.
        """

    def after_train(self, trained_step: TrainedStep, values: dict[str, float]) -> None:
        """Take a step that is trained, while its rollouts are held. May end the run by raising."""

    def after_quiet(self, num_tokens: int, values: dict[str, float]) -> None:
        """Take the number of tokens since the last call, while no engine works."""

    def keep_tokens(self, num_tokens: int) -> None:
        """Take tokens that `after_quiet` will not get, because the run ends before."""

    def after_step(self, values: dict[str, float]) -> None:
        """Take the metrics of a step, before its evaluation and its checkpoint."""

    def after_evaluation(self, values: dict[str, float]) -> None:
        """Take all metrics of a step, with the metrics of its evaluation."""

    def close_step(self, values: Mapping[str, float]) -> dict[str, float]:
        """Count a step that is over, evaluated or not. Returns metrics."""
        return {}

    def configuration(self, c: Configuration) -> Configuration:
        """Return the configuration of the next step. c: of the run."""
        return c

    def last_step(self, step: int) -> int:
        """Return the last step that is certain to have the configuration of `step`."""
        return sys.maxsize

    def ending_key(self, step: int) -> str:
        """Return why the run ends with `step`, or an empty string."""
        return ""

    def accuracy_key(self) -> str:
        """Return the key by which the run, or a part of it, ends by accuracy, or ""."""
        return ""

    def before_end(self) -> None:
        """Raise what is wrong with a run that has trained its last step."""

    def summary(self) -> str:
        """Return a line for people at the end of the run, or an empty string."""
        return ""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, in values of JSON."""
        return {}

    def state_to_save(
        self, state: dict[str, Any], *, has_open_steps: bool, num_uncounted: int
    ) -> dict[str, Any]:
        """Return the state for a checkpoint that is saved now.

        state: at the step of the checkpoint. has_open_steps: it also holds rollouts of later steps.
        num_uncounted: tokens that the next `after_quiet` will get.
        """
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a run was saved. state: empty if the checkpoint has none."""


class Observers(Observer):
    """All features of a run, as one."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def handlers(self) -> CommandTable:
        return {
            kind: handler
            for observer in self._observers
            for kind, handler in observer.handlers().items()
        }

    @contextlib.contextmanager
    def around(self, command: Command) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.around(command))
            yield

    def before_step(self, step: int, parts: StepParts, *, is_under_way: bool) -> None:
        for observer in self._observers:
            observer.before_step(step, parts, is_under_way=is_under_way)

    def prepare(self, command: Train) -> Train:
        for observer in self._observers:
            command = observer.prepare(command)
        return command

    def after_bad_responses(self, step: int, failure: Exception) -> None:
        for observer in self._observers:
            observer.after_bad_responses(step, failure)

    def after_sampling(self, groups: Sequence[Group], values: dict[str, float]) -> None:
        for observer in self._observers:
            observer.after_sampling(groups, values)

    def after_train(self, trained_step: TrainedStep, values: dict[str, float]) -> None:
        for observer in self._observers:
            observer.after_train(trained_step, values)

    def after_quiet(self, num_tokens: int, values: dict[str, float]) -> None:
        for observer in self._observers:
            observer.after_quiet(num_tokens, values)

    def keep_tokens(self, num_tokens: int) -> None:
        for observer in self._observers:
            observer.keep_tokens(num_tokens)

    def after_step(self, values: dict[str, float]) -> None:
        for observer in self._observers:
            observer.after_step(values)

    def after_evaluation(self, values: dict[str, float]) -> None:
        for observer in self._observers:
            observer.after_evaluation(values)

    def close_step(self, values: Mapping[str, float]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for observer in self._observers:
            metrics |= observer.close_step(values)
        return metrics

    def configuration(self, c: Configuration) -> Configuration:
        for observer in self._observers:
            c = observer.configuration(c)
        return c

    def last_step(self, step: int) -> int:
        return min((o.last_step(step) for o in self._observers), default=sys.maxsize)

    def ending_key(self, step: int) -> str:
        return next(filter(None, (o.ending_key(step) for o in self._observers)), "")

    def accuracy_key(self) -> str:
        return next(filter(None, (o.accuracy_key() for o in self._observers)), "")

    def before_end(self) -> None:
        for observer in self._observers:
            observer.before_end()

    def summary(self) -> str:
        return "; ".join(filter(None, (o.summary() for o in self._observers)))

    def state(self) -> dict[str, Any]:
        states = {observer.name: observer.state() for observer in self._observers}
        return {name: state for name, state in states.items() if state}

    def state_to_save(
        self, state: dict[str, Any], *, has_open_steps: bool, num_uncounted: int
    ) -> dict[str, Any]:
        states = {
            observer.name: observer.state_to_save(
                state.get(observer.name, {}),
                has_open_steps=has_open_steps,
                num_uncounted=num_uncounted,
            )
            for observer in self._observers
        }
        return {name: state for name, state in states.items() if state}

    def restore(self, state: dict[str, Any]) -> None:
        """Let each observer go on where a run was saved. Raises `Failure` for a damaged state."""
        for observer in self._observers:
            try:
                observer.restore(state.get(observer.name, {}))
            except msgspec.ValidationError as error:
                raise Failure(
                    f"state.json of the checkpoint: features.{observer.name}: {error}. Use the "
                    "version that saved it, or another checkpoint: run.resume=PATH under another "
                    "run.name",
                    ExitCode.BAD_DATA,
                ) from error
