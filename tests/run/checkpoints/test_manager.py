"""Saving checkpoints, reporting failed saves, and ending a run on a stop request."""

import io
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.curriculum import phases_of
from megatron_rl.contracts.commands import Checkpoint, Command
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.run.checkpoints.manager import SavePoint
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.features.guards.stopped_by_guard import StoppedByGuard
from megatron_rl.run.supervision.stop_request import StopRequest, WaitAborted
from tests.support.checkpoint_managers import (
    FakeRanks,
    make_manager,
    make_stop_request,
    stop_at_step,
)
from tests.support.checkpoints import make_state
from tests.support.configurations import configuration_of
from tests.support.failures import fails
from tests.support.leaders import ScriptedParts, lead


def test_checkpoints_are_saved_every_few_steps_and_at_the_end(tmp_path: Path) -> None:
    ranks = FakeRanks()
    parts = lead(ScriptedParts(), tmp_path, steps=5, checkpoints=make_manager(ranks))
    assert ranks.steps == [2, 4, 5]
    assert [state.position.version for state in ranks.states] == [2, 4, 5]
    assert ranks.states[0].optimizer_steps == 7
    # The number of prompts taken so far
    assert [state.position.selection.prompts.position for state in ranks.states] == [2, 4, 5]
    assert "time/checkpoint" in parts.metrics[3]
    assert "time/checkpoint" not in parts.metrics[2]
    assert parts.calls[-1] == "stop"


def test_a_checkpoint_holds_the_position_of_the_loop(tmp_path: Path) -> None:
    ranks = FakeRanks()
    lead(
        ScriptedParts(finite=[True, False, False], accuracies=[0.1, 0.2, 0.3, 0.4]),
        tmp_path,
        steps=3,
        evals={"every": 1},
        checkpoints=make_manager(ranks, checkpoint_every=1),
    )
    positions = [state.position for state in ranks.states]
    assert [position.features["guards"]["nonfinite"] for position in positions] == [0, 1, 2]
    assert [position.accuracies for position in positions] == [
        (0.1, 0.2),
        (0.1, 0.2, 0.3),
        (0.1, 0.2, 0.3, 0.4),
    ]
    assert all(position.weights_synced for position in positions)
    assert {(state.world_size, state.optimizer_steps) for state in ranks.states} == {(1, 7)}
    assert ranks.states[0].settings == {"seed": 0}


def test_a_checkpoint_says_whether_engines_have_its_weights(tmp_path: Path) -> None:
    ranks = FakeRanks()
    manager = make_manager(ranks, checkpoint_every=1)
    evals = {"every": 2}
    lead(
        ScriptedParts(),
        tmp_path,
        steps=3,
        evals=evals,
        environment="demonstration",
        checkpoints=manager,
    )
    positions = [state.position for state in ranks.states]
    assert [(p.version, p.weights_synced) for p in positions] == [(0, False), (1, True), (2, True)]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    ranks = FakeRanks()
    manager = make_manager(ranks)
    assert manager.is_due(2, last=False)
    manager.save(SavePoint(make_state(2).position))
    assert not manager.is_due(2, last=True)
    manager = make_manager(ranks, background_saves=True)
    manager.save(SavePoint(make_state(4).position), last=False)
    assert not manager.is_due(4, last=True), "the save in the background is of this step"


def test_a_stop_request_makes_a_save_due_and_ends_the_run_after_it() -> None:
    stop = make_stop_request()
    manager = make_manager(FakeRanks(), stop)
    assert not manager.is_due(3, last=False)
    stop.handle_signal(signal.SIGUSR1)
    assert manager.is_due(3, last=False)
    manager.raise_if_stop_requested()  # there is no checkpoint to resume from
    manager.save(SavePoint(make_state(3).position))
    with fails(ExitCode.REQUEUE, match="after step 3"):
        manager.raise_if_stop_requested()


def test_a_stop_request_is_saved_in_the_foreground(tmp_path: Path) -> None:
    stop = make_stop_request()
    ranks = FakeRanks()
    parts = ScriptedParts(on_train=stop_at_step(stop, 2))
    with fails(ExitCode.REQUEUE, match="after step 2"):
        manager = make_manager(ranks, stop, background_saves=True)
        lead(parts, tmp_path, steps=9, checkpoints=manager)
    assert ranks.calls == ["save 2"]


def test_a_failed_save_after_a_stop_request_is_not_reported_as_saved(tmp_path: Path) -> None:
    stop = make_stop_request()
    ranks = FakeRanks("", "disk full")
    manager = make_manager(ranks, stop)
    parts = ScriptedParts(on_train=stop_at_step(stop, 3))
    with pytest.raises(Failure, match=r"step 3 cannot be saved: disk full"):
        lead(parts, tmp_path, steps=9, checkpoints=manager)
    assert ranks.steps == [2, 3]


@pytest.mark.parametrize(("saved_step", "resume"), [(None, "runs/old"), (4, "auto")])
def test_a_save_without_its_rollouts_asks_for_no_space(saved_step: int | None, resume: str) -> None:
    ranks: Any = SimpleNamespace(
        run=lambda command: SaveResult(command.step, "rollouts: gone", lacks_rollouts=True)
    )
    manager = make_manager(ranks, resume="runs/old")
    manager.start_step = 4
    manager.last_saved_step = saved_step
    with fails(ExitCode.CANNOT_WRITE, match=f"Start again with run.resume={resume}") as failure:
        manager.save(SavePoint(make_state(5).position))
    assert "space" not in str(failure.value)


def test_a_run_without_checkpoints_does_not_stop_on_request(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    ranks = FakeRanks()
    stop = StopRequest(10.0)
    stop.watch_file(tmp_path / "stop")
    manager = make_manager(ranks, stop, checkpoint_every=0)
    parts = lead(ScriptedParts(), tmp_path, steps=3, evals={"every": 1}, checkpoints=manager)
    assert "evaluate 3 at version 3" in parts.calls
    assert ranks.calls == []


def test_a_stop_request_ends_the_step_saves_and_asks_for_a_restart(tmp_path: Path) -> None:
    ranks = FakeRanks()
    stop = make_stop_request()
    parts = ScriptedParts(on_train=stop_at_step(stop, 3))
    with fails(ExitCode.REQUEUE, match=r"SIGUSR1.*after step 3.*run\.resume=auto") as failure:
        lead(parts, tmp_path, steps=9, checkpoints=make_manager(ranks, stop))
    assert failure.value.exit_code is ExitCode.REQUEUE
    assert ExitCode.REQUEUE == 75
    assert ranks.steps == [2, 3]
    assert "train 4" not in parts.calls


def test_a_step_that_waits_for_rollouts_is_aborted_when_time_is_short(tmp_path: Path) -> None:
    now = [0.0]
    ranks = FakeRanks()
    stop = make_stop_request(clock=lambda: now[0])

    def on_sample(step: int) -> None:
        if step == 4:
            stop.handle_signal(signal.SIGTERM)
            stop.check_deadline()  # more than half of the time is left
            now[0] = 5.5
            stop.check_deadline()

    parts = ScriptedParts(on_sample=on_sample)
    with fails(ExitCode.REQUEUE):
        lead(parts, tmp_path, steps=9, checkpoints=make_manager(ranks, stop))
    assert ranks.steps == [2, 3]
    assert not stop.is_wait_abortable, "the deadline must not abort the last save"
    # The prompts of step 4 will be taken again
    assert ranks.states[-1].position.selection.prompts.position == 3


@pytest.mark.parametrize("is_file", [True, False])
def test_a_step_that_waits_is_aborted_before_the_job_ends(tmp_path: Path, is_file: bool) -> None:
    now = [0.0]
    ranks = FakeRanks()
    stop = StopRequest(10.0, clock=lambda: now[0], seconds_of_job=lambda: 300.0 - now[0])
    stop.watch_file(tmp_path / "stop")

    def on_sample(step: int) -> None:
        if step == 4:
            stop.check_deadline()
            if is_file:
                (tmp_path / "stop").touch()
            else:
                stop.handle_signal(signal.SIGUSR1)
            stop.check_deadline()
            now[0] = 149.0
            stop.check_deadline()  # more than half of the time is left
            assert stop.seconds_left == 151.0
            now[0] = 151.0
            stop.check_deadline()

    parts = ScriptedParts(on_sample=on_sample)
    with fails(ExitCode.REQUEUE, match="the file stop" if is_file else "SIGUSR1"):
        lead(parts, tmp_path, steps=9, checkpoints=make_manager(ranks, stop))
    assert ranks.steps == [2, 3]
    now[0] = 301.0
    assert not stop.has_expired, "Slurm ends the job, and may give it more time"


def test_a_file_requests_a_stop_like_a_signal(tmp_path: Path) -> None:
    ranks = FakeRanks()
    stop_file = tmp_path / "stop"
    parts = ScriptedParts(on_train=lambda step: stop_file.touch() if step == 1 else None)
    stop = StopRequest(10.0)
    stop.watch_file(stop_file)
    manager = make_manager(ranks, stop)
    with fails(ExitCode.REQUEUE, match=r"the file stop.*after step 1"):
        lead(parts, tmp_path, steps=9, checkpoints=manager)
    assert ranks.steps == [1]


def test_a_step_that_trains_is_never_aborted() -> None:
    now = [0.0]
    stop = make_stop_request(clock=lambda: now[0])
    stop.handle_signal(signal.SIGTERM)
    now[0] = 9.0
    stop.check_deadline()
    stop.is_wait_abortable = True
    with pytest.raises(WaitAborted):
        stop.check_deadline()
    assert not stop.has_expired
    now[0] = 10.5
    assert stop.has_expired


def test_a_failed_save_ends_the_run(tmp_path: Path) -> None:
    manager = make_manager(FakeRanks("", "disk full"))
    with pytest.raises(
        Failure, match=r"step 4 cannot be saved: disk full; .*step 2 is still complete"
    ):
        lead(ScriptedParts(), tmp_path, steps=5, checkpoints=manager)


def test_background_saves_are_waited_for_before_the_next_and_at_the_end(tmp_path: Path) -> None:
    ranks = FakeRanks()
    manager = make_manager(ranks, background_saves=True)
    lead(ScriptedParts(), tmp_path, steps=5, checkpoints=manager)
    assert ranks.calls == ["begin 2", "wait", "begin 4", "wait", "save 5"]


def test_a_failed_background_save_ends_the_run(tmp_path: Path) -> None:
    manager = make_manager(FakeRanks("disk full"), background_saves=True)
    with pytest.raises(Failure, match=r"step 2 cannot be saved: disk full"):
        lead(ScriptedParts(), tmp_path, steps=5, checkpoints=manager)


def test_a_stop_request_during_a_background_save_ends_with_that_checkpoint(
    tmp_path: Path,
) -> None:
    stop = make_stop_request()

    class StoppingRanks(FakeRanks):
        def run(self, command: Command) -> SaveResult | None:
            if isinstance(command, Checkpoint) and command.step == 4:
                stop.handle_signal(signal.SIGUSR1)
            return super().run(command)

    ranks = StoppingRanks()
    manager = make_manager(ranks, stop, background_saves=True)
    with fails(ExitCode.REQUEUE, match="after step 4"):
        lead(ScriptedParts(), tmp_path, steps=9, checkpoints=manager)
    assert ranks.calls == ["begin 2", "wait", "begin 4", "wait"]


def test_an_evaluation_after_a_stop_request_is_made_up_for(tmp_path: Path) -> None:
    stop = make_stop_request()
    ranks = FakeRanks()
    accuracies = [0.1, 0.2, 0.3, 0.4, 0.5]
    parts = ScriptedParts(accuracies=accuracies, on_train=stop_at_step(stop, 3))
    with fails(ExitCode.REQUEUE):
        lead(parts, tmp_path, steps=4, evals={"every": 1}, checkpoints=make_manager(ranks, stop))
    assert "eval/accuracy" in parts.metrics[2]
    assert "eval/accuracy" not in parts.metrics[3]
    state = ranks.states[-1].position
    resumed_parts = ScriptedParts(accuracies=accuracies[3:])
    lead(resumed_parts, tmp_path, steps=4, evals={"every": 1}, resume_state=state)
    assert resumed_parts.metrics[3]["eval/accuracy"] == 0.4
    assert resumed_parts.metrics[3]["train/samples"] == parts.metrics[3]["train/samples"]
    assert resumed_parts.metrics[4]["eval/accuracy"] == 0.5


def test_a_run_that_resumes_at_step_0_is_not_evaluated_twice(tmp_path: Path) -> None:
    cursor = PromptCursor(epoch=0, position=0, digest="d")
    state = make_state(0, version=1, selection=SelectorState(prompts=cursor)).position
    parts = lead(ScriptedParts(), tmp_path, steps=2, evals={"every": 1}, resume_state=state)
    assert sorted(parts.metrics) == [1, 2]


def test_sigterm_is_a_stop_request_once_the_run_can_save() -> None:
    stop = StopRequest(10.0)
    assert not stop.handle_signal(signal.SIGTERM)
    assert stop.signal_name is None
    stop.accept_signals()
    # Slurm and torchrun both send it
    assert stop.handle_signal(signal.SIGTERM)
    assert stop.handle_signal(signal.SIGTERM)
    assert stop.signal_name == "SIGTERM"
    assert not stop.handle_signal(signal.SIGINT)


def test_sigusr1_during_setup_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    stop = StopRequest(10.0)
    ranks = FakeRanks()
    parts = ScriptedParts()
    assert stop.handle_signal(signal.SIGUSR1)
    stop.accept_signals()
    manager = make_manager(ranks, stop)
    with fails(ExitCode.REQUEUE, match=r"SIGUSR1.*after step 0"):
        lead(parts, tmp_path, steps=9, evals={"every": 1}, checkpoints=manager)
    assert ranks.calls == ["save 0"]
    assert parts.calls == ["sync 0"]


def test_a_run_that_reached_its_accuracy_trains_no_more_after_a_resume(tmp_path: Path) -> None:
    state = make_state(3, accuracies=(0.1, 0.5, 0.7)).position
    stream = io.StringIO()
    evals = {"every": 1, "stop_at": 0.6}
    parts = lead(ScriptedParts(), tmp_path, steps=9, evals=evals, resume_state=state, stream=stream)
    # The run was killed before these
    assert parts.calls == ["save step-3", "finish", "stop"]
    assert "nothing is left to train after step 3: raise eval.stop_at" in stream.getvalue()
    evals["stop_at"] = 0.9
    parts = lead(ScriptedParts(), tmp_path, steps=4, evals=evals, resume_state=state)
    assert "train 4" in parts.calls


def test_a_run_without_steps_left_trains_no_more_after_a_resume(tmp_path: Path) -> None:
    state = make_state(3, accuracies=(0.1, 0.5, 0.7)).position
    stream = io.StringIO()
    parts = lead(ScriptedParts(), tmp_path, steps=3, resume_state=state, stream=stream)
    assert "train 4" not in parts.calls
    assert "nothing is left to train after step 3: raise train.total_steps" in stream.getvalue()


def test_a_run_resumes_after_its_checkpoint(tmp_path: Path) -> None:
    cursor = PromptCursor(epoch=0, position=3, digest="d")
    selection = SelectorState(prompts=cursor)
    run_state = make_state(3, version=3, selection=selection, accuracies=(0.4,))
    parts = lead(
        ScriptedParts(finite=[False]),
        tmp_path,
        steps=5,
        resume_state=run_state.position,
    )
    # The engines receive the weights of the checkpoint first
    assert parts.calls[:3] == ["sync 3", "sample step-4", "train 4"]
    assert sorted(parts.metrics) == [4, 5]
    assert parts.cursor.position == 5
    assert parts.version == 5


def test_steps_with_nan_before_a_resume_count(tmp_path: Path) -> None:
    cursor = PromptCursor(epoch=0, position=3, digest="d")
    state = make_state(
        3, features={"guards": {"nonfinite": 2}}, selection=SelectorState(prompts=cursor)
    ).position
    with pytest.raises(StoppedByGuard, match="3 consecutive steps"):
        lead(
            ScriptedParts(finite=[False]),
            tmp_path,
            steps=9,
            resume_state=state,
        )


def test_evaluations_before_a_resume_count(tmp_path: Path) -> None:
    state = make_state(3, accuracies=(0.1, 0.5)).position
    evals = {"every": 1, "stop_at": 0.6}
    parts = lead(
        ScriptedParts(accuracies=[0.7]), tmp_path, steps=9, evals=evals, resume_state=state
    )
    assert sorted(parts.metrics) == [4]


def test_other_weights_are_sent_under_another_version_after_a_resume(tmp_path: Path) -> None:
    """With demonstrations, the first weights sent are those after further steps."""
    state = make_state(2, version=1, weights_synced=True).position
    options: dict[str, Any] = {"steps": 4, "evals": {"every": 2}, "resume_state": state}
    parts = lead(ScriptedParts(), tmp_path, environment="demonstration", **options)
    assert [call for call in parts.calls if "sync" in call] == ["sync 2"]
    state = msgspec.structs.replace(state, weights_synced=False)
    parts = lead(ScriptedParts(), tmp_path, **(options | {"resume_state": state}))
    assert [call for call in parts.calls if "sync" in call][:1] == ["sync 2"]


@pytest.mark.slow
@pytest.mark.parametrize("stop_step", [1, 2, 3, 4])
def test_a_run_stopped_before_an_evaluation_goes_through_the_same_phases(
    tmp_path: Path, stop_step: int
) -> None:
    short = "{name: short, until: {steps: 2}}"
    long = "{name: long, until: {accuracy: 0.6}}"
    overrides = ["selection=belief", "eval.every=1", f"curriculum=[{short},{long},{{name: last}}]"]
    phases = phases_of(configuration_of(overrides))
    accuracies = [0.9, 0.9, 0.9, 0.7, 0.1, 0.1]
    options: dict[str, Any] = {"steps": 5, "evals": {"every": 1}, "phases": phases}
    whole_run = lead(ScriptedParts(accuracies=accuracies), tmp_path, **options)
    stop = make_stop_request()
    ranks = FakeRanks()
    parts = ScriptedParts(accuracies=accuracies, on_train=stop_at_step(stop, stop_step))
    with fails(ExitCode.REQUEUE):
        lead(parts, tmp_path, checkpoints=make_manager(ranks, stop), **options)
    second_run = lead(
        ScriptedParts(accuracies=accuracies[stop_step:]),
        tmp_path,
        resume_state=ranks.states[-1].position,
        **options,
    )
    for step in range(stop_step, 6):
        for name in ("phase/index", "phase/tokens", "eval/accuracy"):
            assert second_run.metrics[step][name] == whole_run.metrics[step][name]


def test_metrics_with_nan_survive_in_a_checkpoint(tmp_path: Path) -> None:
    stop = make_stop_request()
    ranks = FakeRanks()
    parts = ScriptedParts(finite=[True, False], on_train=stop_at_step(stop, 2))
    parts.extra_metrics = {"train/loss": float("nan")}
    with fails(ExitCode.REQUEUE):
        lead(
            parts,
            tmp_path,
            steps=9,
            evals={"every": 1},
            checkpoints=make_manager(ranks, stop),
        )
    state = ranks.states[-1].position
    assert state.unevaluated_metrics is not None
    assert state.unevaluated_metrics["train/loss"] is None
    resumed_parts = ScriptedParts()
    lead(resumed_parts, tmp_path, steps=3, evals={"every": 1}, resume_state=state)
    assert math.isnan(resumed_parts.metrics[2]["train/loss"])
