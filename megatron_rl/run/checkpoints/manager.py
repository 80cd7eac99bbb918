"""When a run saves what it needs to go on, and how it ends when it was told to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import RunSettings
from megatron_rl.contracts.commands import Checkpoint, WaitForSave
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import LoopState, RunState
from megatron_rl.records.progress import Progress
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.checkpoints.state_file import encode_state
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.training.dispatcher import Dispatcher

_MIB = 2**20


class CheckpointNotSaved(Failure):
    """A checkpoint cannot be written, and run.on_failed_save says that the run shall end then."""

    exit_code = ExitCode.CANNOT_WRITE


class StoppedAfterSave(Failure):
    """The run was told to stop, and goes on from a checkpoint when it is started again."""

    exit_code = ExitCode.REQUEUE


@dataclass
class CheckpointManager:
    """Rank 0's. facts: every key of the run; optimizer_steps: counts them; saved: the step of the
    newest checkpoint.

    request: a file whose existence asks the run to stop, as SIGUSR1 does.
    """

    settings: RunSettings
    facts: dict[str, Any]
    world_size: int
    optimizer_steps: Callable[[], int]
    dispatcher: Dispatcher
    progress: Progress
    stop: StopRequest
    request: Path
    saved: int | None = None
    _writing: bool = False

    @property
    def stop_requested(self) -> bool:
        return self.settings.checkpoint_every > 0 and bool(self._asked)

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after a step."""
        every = self.settings.checkpoint_every
        if last or self.stop_requested:
            self.settle()
        return every > 0 and step != self.saved and (last or step % every == 0 or self.stop_requested)

    def save(self, position: LoopState, *, last: bool = True) -> dict[str, float]:
        """Save a checkpoint; returns its metrics. Raises `CheckpointNotSaved`. last: nothing will
        be done meanwhile.
        """
        state = RunState(
            position=position,
            optimizer_steps=self.optimizer_steps(),
            world_size=self.world_size,
            settings=self.facts,
        )
        watch, background = (
            Stopwatch(),
            self.settings.background_saves and not last and not self.stop_requested,
        )
        with (
            watch.section("checkpoint"),
            self.progress.task(f"saving the checkpoint of step {state.step}"),
        ):
            values = self.settle()
            command = Checkpoint(state.step, encode_state(state), background)
            outcome: SaveResult | None = self.dispatcher.run(command)
        self._writing = background
        return watch.seconds | values | (self._tell(outcome) if outcome is not None else {})

    def settle(self) -> dict[str, float]:
        """Wait for a checkpoint that is being written; returns its metrics. Raises
        `CheckpointNotSaved`.
        """
        if not self._writing:
            return {}
        self._writing = False
        outcome: SaveResult = self.dispatcher.run(WaitForSave())
        return self._tell(outcome)

    def _tell(self, outcome: SaveResult) -> dict[str, float]:
        """Say what became of a save."""
        if outcome.problem:
            self._explain(outcome.step, outcome.problem)
            return {"checkpoint/failed": 1.0}
        self.saved = outcome.step
        self.progress.log(f"checkpoint of step {outcome.step}: {outcome.nbytes / _MIB:,.1f} MiB")
        return {}

    def raise_if_stop_requested(self) -> None:
        """Raises `StoppedAfterSave` once a run that was told to stop has saved."""
        if self.stop_requested and self.saved is not None:
            raise StoppedAfterSave(
                f"the run was told to stop ({self._asked}) and has saved a checkpoint after step {self.saved}; "
                "start it again with run.resume=auto"
            )

    @contextlib.contextmanager
    def nothing_trained(self) -> Iterator[None]:
        """Within it a step may be given up: rollouts are awaited."""
        self.stop.nothing_trained = True
        try:
            yield
        finally:
            self.stop.nothing_trained = False

    @property
    def _asked(self) -> str:
        """How the run was told to stop; empty where nobody did."""
        return self.stop.asked or (f"the file {self.request.name}" if self.request.exists() else "")

    def _explain(self, step: int, problem: str) -> None:
        before = (
            "there is none before it"
            if self.saved is None
            else f"that of step {self.saved} is still whole"
        )
        said = f"the checkpoint of step {step} cannot be saved: {problem}; {before}"
        if self.settings.on_failed_save == "stop" or self.stop_requested:
            raise CheckpointNotSaved(f"{said}. Make room, and start again with run.resume=auto")
        self.progress.log(f"warning: {said}; the run goes on (run.on_failed_save=continue)")
