"""When a run saves, what it says of a save that fails, and how it ends when it is told to stop."""

import io
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import RunSettings
from megatron_rl.contracts.commands import Checkpoint, Command
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.run_state import PromptCursor, RunState, SelectorState
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.manager import (
    CheckpointManager,
    CheckpointNotSaved,
    StoppedAfterSave,
)
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.supervision.stop_request import StepAborted, StopRequest
from tests.support.checkpoints import make_state
from tests.support.leaders import ScriptedParts, lead


class Ranks:
    """Remembers what was saved; `problems`: what becomes of each save in turn."""

    def __init__(self, *problems: str) -> None:
        self.saved: list[RunState] = []
        self.calls: list[str] = []
        self._problems = iter(problems)

    def run(self, command: Command) -> SaveResult | None:
        if isinstance(command, Checkpoint):
            self.saved.append(msgspec.json.decode(command.state, type=RunState))
            self.calls.append(f"{'begin' if command.background else 'save'} {command.step}")
            if command.background:
                return None
        else:
            self.calls.append("settle")
        return SaveResult(self.saved[-1].step, next(self._problems, ""), 2**20)


def keeper(
    ranks: Ranks,
    stop: StopRequest,
    *,
    stream: Any = None,
    request: Path = Path("/nowhere"),
    **run: Any,
) -> CheckpointManager:
    return CheckpointManager(
        settings=RunSettings(**({"checkpoint_every": 2} | run)),
        facts={"seed": 0},
        world_size=1,
        optimizer_steps=lambda: 7,
        dispatcher=ranks,  # type: ignore[arg-type]
        progress=Progress(9, enabled=stream is not None, stream=stream),
        stop=stop,
        request=request,
    )


def stop_request(*, clock: Any = None) -> StopRequest:
    stop = StopRequest(10.0, clock=clock) if clock else StopRequest(10.0)
    stop.accept()
    return stop


def test_checkpoints_come_every_few_steps_and_at_the_end(tmp_path: Path) -> None:
    ranks = Ranks()
    parts = lead(ScriptedParts(), tmp_path, steps=5, checkpoints=keeper(ranks, stop_request()))
    assert [state.step for state in ranks.saved] == [2, 4, 5]
    assert [state.position.version for state in ranks.saved] == [2, 4, 5] and ranks.saved[
        0
    ].optimizer_steps == 7
    assert [state.position.selection.prompts.position for state in ranks.saved] == [2, 4, 5], (
        "prompts that were taken"
    )
    assert "time/checkpoint" in parts.metrics[3] and "time/checkpoint" not in parts.metrics[2]
    assert parts.calls[-1] == "stop"


def test_a_run_that_is_told_to_stop_ends_its_step_saves_and_asks_to_be_started_again(
    tmp_path: Path,
) -> None:
    ranks, stop = Ranks(), stop_request()
    parts = ScriptedParts(on_train=lambda step: stop.take(signal.SIGUSR1) if step == 3 else None)
    with pytest.raises(
        StoppedAfterSave, match=r"SIGUSR1.*after step 3; start it again with run\.resume=auto"
    ) as told:
        lead(parts, tmp_path, steps=9, checkpoints=keeper(ranks, stop))
    assert told.value.exit_code is ExitCode.REQUEUE == 75
    assert [state.step for state in ranks.saved] == [2, 3]
    assert "train 4" not in parts.calls


def test_a_step_that_has_trained_nothing_is_given_up_when_time_runs_out(tmp_path: Path) -> None:
    now = [0.0]
    ranks, stop = Ranks(), stop_request(clock=lambda: now[0])

    def on_sample(step: int) -> None:
        if step == 4:
            stop.take(signal.SIGTERM)
            stop.check_deadline()  # half of the limit is left
            now[0] = 5.5
            stop.check_deadline()

    with pytest.raises(StoppedAfterSave):
        lead(ScriptedParts(on_sample=on_sample), tmp_path, steps=9, checkpoints=keeper(ranks, stop))
    assert [state.step for state in ranks.saved] == [2, 3]
    assert ranks.saved[-1].position.selection.prompts.position == 3, (
        "the prompts of step 4 are drawn again"
    )


def test_a_file_asks_as_a_signal_does(tmp_path: Path) -> None:
    ranks, request = Ranks(), tmp_path / "stop"
    parts = ScriptedParts(on_train=lambda step: request.touch() if step == 1 else None)
    with pytest.raises(StoppedAfterSave, match=r"the file stop.*after step 1"):
        lead(parts, tmp_path, steps=9, checkpoints=keeper(ranks, StopRequest(10.0), request=request))
    assert [state.step for state in ranks.saved] == [1]


def test_a_step_that_trains_is_never_given_up() -> None:
    now = [0.0]
    stop = stop_request(clock=lambda: now[0])
    stop.take(signal.SIGTERM)
    now[0] = 9.0
    stop.check_deadline()
    stop.nothing_trained = True
    with pytest.raises(StepAborted):
        stop.check_deadline()
    assert not stop.expired
    now[0] = 10.5
    assert stop.expired


def test_a_save_that_fails_ends_the_run_or_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointNotSaved,
        match=r"step 4 cannot be saved: disk full; that of step 2 is still whole",
    ):
        lead(ScriptedParts(), tmp_path, steps=5, checkpoints=keeper(Ranks("", "disk full"), stop_request()))
    said, ranks = io.StringIO(), Ranks("disk full")
    parts = lead(
        ScriptedParts(),
        tmp_path,
        steps=5,
        checkpoints=keeper(ranks, stop_request(), stream=said, on_failed_save="continue"),
    )
    assert (
        "warning: the checkpoint of step 2 cannot be saved: disk full; there is none before it"
        in said.getvalue()
    )
    assert parts.metrics[3]["checkpoint/failed"] == 1.0 and [
        state.step for state in ranks.saved
    ] == [2, 4, 5]


def test_saves_in_the_background_are_settled_before_the_next_and_at_the_end(tmp_path: Path) -> None:
    ranks = Ranks()
    lead(ScriptedParts(), tmp_path, steps=5, checkpoints=keeper(ranks, stop_request(), background_saves=True))
    assert ranks.calls == ["begin 2", "settle", "begin 4", "settle", "save 5"]
    with pytest.raises(CheckpointNotSaved, match=r"step 2 cannot be saved: disk full"):
        lead(
            ScriptedParts(),
            tmp_path,
            steps=5,
            checkpoints=keeper(Ranks("disk full"), stop_request(), background_saves=True),
        )


def test_a_run_that_is_told_during_a_background_save_ends_with_that_checkpoint(
    tmp_path: Path,
) -> None:
    stop = stop_request()

    class ScoredRollouts(Ranks):
        def run(self, command: Command) -> SaveResult | None:
            if isinstance(command, Checkpoint) and command.step == 4:
                stop.take(signal.SIGUSR1)
            return super().run(command)

    ranks = ScoredRollouts()
    with pytest.raises(StoppedAfterSave, match="after step 4"):
        lead(ScriptedParts(), tmp_path, steps=9, checkpoints=keeper(ranks, stop, background_saves=True))
    assert ranks.calls == ["begin 2", "settle", "begin 4", "settle"]


def test_a_run_that_is_told_to_stop_evaluates_no_more(tmp_path: Path) -> None:
    stop = stop_request()
    parts = ScriptedParts(on_train=lambda step: stop.take(signal.SIGUSR1) if step == 3 else None)
    with pytest.raises(StoppedAfterSave):
        lead(parts, tmp_path, steps=9, evals={"every": 1}, checkpoints=keeper(Ranks(), stop))
    assert "eval/accuracy" in parts.metrics[2] and "eval/accuracy" not in parts.metrics[3]


def test_a_run_that_goes_on_at_its_start_is_not_evaluated_twice(tmp_path: Path) -> None:
    position = make_state(
        0, version=1, selection=SelectorState(prompts=PromptCursor(epoch=0, position=0, digest="d"))
    ).position
    parts = lead(ScriptedParts(), tmp_path, steps=2, evals={"every": 1}, resume_state=position)
    assert sorted(parts.metrics) == [1, 2]


def test_signals_are_requests_once_there_is_something_to_save() -> None:
    stop = StopRequest(10.0)
    assert not stop.take(signal.SIGTERM) and stop.asked is None
    stop.accept()
    assert stop.take(signal.SIGTERM) and stop.take(signal.SIGTERM), (
        "Slurm and torchrun both send it"
    )
    assert stop.asked == "SIGTERM" and not stop.take(signal.SIGINT)


def test_a_warning_while_the_run_is_set_up_ends_it_before_its_first_step(tmp_path: Path) -> None:
    stop, ranks, stage = StopRequest(10.0), Ranks(), ScriptedParts()
    assert stop.take(signal.SIGUSR1)
    stop.accept()
    with pytest.raises(StoppedAfterSave, match=r"SIGUSR1.*after step 0"):
        lead(parts, tmp_path, steps=9, evals={"every": 1}, checkpoints=keeper(ranks, stop))
    assert ranks.calls == ["save 0"] and parts.calls == ["sync 0"]


def test_a_run_that_its_accuracy_ended_trains_no_more_when_it_goes_on(tmp_path: Path) -> None:
    position, said = make_state(3, accuracies=(0.1, 0.5, 0.7)).position, io.StringIO()
    evals = {"every": 1, "stop_at": 0.6}
    parts = lead(ScriptedParts(), tmp_path, steps=9, evals=evals, resume_state=position, stream=said)
    assert parts.calls == ["save step-3", "finish", "stop"], "what it was killed before"
    assert (
        "nothing is left to train after step 3: raise eval.stop_at to train further"
        in said.getvalue()
    )
    raised = lead(ScriptedParts(), tmp_path, steps=4, evals=evals | {"stop_at": 0.9}, resume_state=position)
    assert "train 4" in raised.calls
    said = io.StringIO()
    assert "train 4" not in lead(ScriptedParts(), tmp_path, steps=3, resume_state=position, stream=said).calls
    assert "nothing is left to train after step 3: raise train.total_steps" in said.getvalue()


def test_a_run_goes_on_behind_its_checkpoint(tmp_path: Path) -> None:
    cursor = PromptCursor(epoch=0, position=3, digest="d")
    position = make_state(
        3, version=3, selection=SelectorState(prompts=cursor), accuracies=(0.4,), nonfinite=1
    ).position
    parts = lead(ScriptedParts(finite=[False]), tmp_path, steps=5, resume_state=position, max_nonfinite_steps=3)
    assert parts.calls[:3] == ["sync 3", "sample step-4", "train 4"], (
        "the engines get the checkpoint's weights first"
    )
    assert sorted(parts.metrics) == [4, 5] and stage.cursor.position == 5
    assert stage.version == 5
