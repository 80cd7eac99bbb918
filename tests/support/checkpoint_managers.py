"""A checkpoint manager over ranks that only note the states they would save."""

from __future__ import annotations

import signal
from typing import Any

import msgspec

from megatron_rl.config.schema import RunSettings
from megatron_rl.contracts.commands import BatchAhead, Checkpoint, Command
from megatron_rl.contracts.run_state import RunState
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.supervision.stop_request import StopRequest


class FakeRanks:
    """Collects the states that are saved. problems: the problem of each save in turn."""

    def __init__(self, *problems: str) -> None:
        self.states: list[RunState] = []
        self.batches: list[tuple[BatchAhead, ...]] = []  # of each save
        self.calls: list[str] = []
        self._problems = iter(problems)

    @property
    def steps(self) -> list[int]:
        return [state.step for state in self.states]

    def run(self, command: Command) -> SaveResult | None:
        if isinstance(command, Checkpoint):
            self.states.append(msgspec.json.decode(command.state, type=RunState))
            self.batches.append(command.batches)
            self.calls.append(f"{'begin' if command.background else 'save'} {command.step}")
            if command.background:
                return None
        else:
            self.calls.append("wait")
        return SaveResult(self.steps[-1], next(self._problems, ""), 2**20)


def make_manager(
    ranks: FakeRanks,
    stop: StopRequest | None = None,
    *,
    stream: Any = None,
    **run: Any,
) -> CheckpointManager:
    settings: dict[str, Any] = {"checkpoint_every": 2} | run
    return CheckpointManager(
        settings=RunSettings(**settings),
        configuration={"seed": 0},
        world_size=1,
        optimizer_steps=lambda: 7,
        dispatcher=ranks,  # type: ignore[arg-type]
        progress=Progress(9, is_enabled=stream is not None, stream=stream),
        stop=stop or make_stop_request(),
    )


def make_stop_request(*, clock: Any = None) -> StopRequest:
    stop = StopRequest(10.0, clock=clock) if clock else StopRequest(10.0)
    stop.accept_signals()
    return stop


def stop_at_step(stop: StopRequest, last_step: int) -> Any:
    def on_train(step: int) -> None:
        if step == last_step:
            stop.handle_signal(signal.SIGUSR1)

    return on_train
