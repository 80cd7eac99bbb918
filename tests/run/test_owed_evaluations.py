"""Evaluations that failed or were stopped: their step is saved, and a resumed run repeats them."""

import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.schema import EvalSettings
from megatron_rl.contracts.commands import Checkpoint, Command
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.supervision.stop_request import StopRequest
from tests.support.checkpoint_managers import (
    FakeRanks,
    make_manager,
    make_stop_request,
    stop_at_step,
)
from tests.support.configurations import configuration_of
from tests.support.failures import fails
from tests.support.leaders import ScriptedParts, lead

EVERY_STEP = {"every": 1}


def parts_whose_evaluation_fails(failing_step: int, **options: Any) -> ScriptedParts:
    parts = ScriptedParts(**options)

    def fail(label: str) -> None:
        if label == str(failing_step):
            raise Failure("too many responses are lost", ExitCode.ENGINE_FAILED)

    parts.on_measure = fail
    return parts


def position_of_a_stopped_run(tmp_path: Path) -> LoopState:
    """The position after step 3, whose evaluation a stop request prevented."""
    stop = make_stop_request()
    ranks = FakeRanks()
    parts = ScriptedParts(on_train=stop_at_step(stop, 3))
    manager = make_manager(ranks, stop)
    with fails(ExitCode.REQUEUE):
        lead(parts, tmp_path, steps=9, evals=EVERY_STEP, checkpoints=manager)
    return ranks.states[-1].position


def test_a_step_whose_evaluation_fails_is_saved_with_what_it_trained(tmp_path: Path) -> None:
    phases = phases_of(
        configuration_of(["selection=belief", "eval.every=1", "curriculum=[{name: only}]"])
    )
    ranks = FakeRanks()
    options: dict[str, Any] = {"steps": 9, "evals": EVERY_STEP, "phases": phases}
    parts = parts_whose_evaluation_fails(3)
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, checkpoints=make_manager(ranks), **options)
    assert ranks.steps == [2, 3]
    assert not any(call.startswith("save") for call in parts.calls), "the run has not ended"
    state = ranks.states[-1].position
    assert state.unevaluated_metrics is not None
    assert state.features["curriculum"]["tokens"] == 24
    assert state.unevaluated_metrics["phase/tokens"] == 24
    resumed_parts = lead(ScriptedParts(), tmp_path, resume_state=state, **(options | {"steps": 4}))
    assert resumed_parts.metrics[3]["eval/accuracy"] == 0.5
    assert resumed_parts.metrics[4]["phase/tokens"] == 32


def test_a_failed_evaluation_without_checkpoints_saves_no_weights_before_the_end(
    tmp_path: Path,
) -> None:
    parts = parts_whose_evaluation_fails(2)
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, steps=3, evals=EVERY_STEP)
    assert not any(call.startswith("save") for call in parts.calls)


def test_tokens_of_an_evaluation_that_is_refused_are_not_counted_twice(tmp_path: Path) -> None:
    ranks = FakeRanks()
    with fails(ExitCode.REFUSED):
        lead(
            ScriptedParts(accuracies=[0.1, None]),
            tmp_path,
            steps=3,
            evals=EVERY_STEP | {"stop_at": 0.9},
            checkpoints=make_manager(ranks, checkpoint_every=1),
        )
    metrics = ranks.states[-1].position.unevaluated_metrics
    assert metrics is not None
    assert "account/evaluation" not in metrics
    assert metrics["account/generated"] == 8.0


def test_an_error_of_the_save_does_not_hide_why_the_evaluation_failed(tmp_path: Path) -> None:
    class BrokenRanks(FakeRanks):
        def run(self, command: Command) -> SaveResult | None:
            if isinstance(command, Checkpoint):
                raise RuntimeError("a rank has ended")
            return super().run(command)

    parts = parts_whose_evaluation_fails(1)
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, steps=9, evals=EVERY_STEP, checkpoints=make_manager(BrokenRanks()))


def test_an_owed_evaluation_that_fails_keeps_the_record_of_its_step(tmp_path: Path) -> None:
    state = position_of_a_stopped_run(tmp_path)
    parts = parts_whose_evaluation_fails(3)
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, steps=9, evals=EVERY_STEP, resume_state=state)
    assert parts.metrics[3]["rollout/tokens"] == 8


def test_an_owed_evaluation_has_the_settings_of_its_phase(tmp_path: Path) -> None:
    first = "{name: first, rollout.max_new_tokens: 24, until: {steps: 2}}"
    second = "{name: second, rollout.max_new_tokens: 28}"
    curriculum = f"curriculum=[{first},{second}]"
    phases = phases_of(configuration_of(["selection=belief", "eval.every=1", curriculum]))
    ranks = FakeRanks()
    options: dict[str, Any] = {"steps": 9, "evals": EVERY_STEP, "phases": phases}
    with fails(ExitCode.ENGINE_FAILED):
        parts = parts_whose_evaluation_fails(3)
        lead(parts, tmp_path, checkpoints=make_manager(ranks), **options)
    state = ranks.states[-1].position
    parts = lead(ScriptedParts(), tmp_path, resume_state=state, **(options | {"steps": 4}))
    evaluation = parts.calls.index("evaluate 3 at version 3")
    assert parts.calls.index("open parts for 28 tokens") < evaluation
    assert parts.calls.index("enter 1") < evaluation
    assert "enter 0" not in parts.calls


def test_an_evaluation_that_was_made_up_for_is_not_owed_again(tmp_path: Path) -> None:
    state = position_of_a_stopped_run(tmp_path)
    now = [0.0]
    ranks = FakeRanks()
    stop = make_stop_request(clock=lambda: now[0])

    def abort(step: int) -> None:
        stop.handle_signal(signal.SIGTERM)
        now[0] = 5.5
        stop.check_deadline()

    parts = ScriptedParts(on_sample=abort)
    manager = make_manager(ranks, stop)
    with fails(ExitCode.REQUEUE, match="after step 3"):
        lead(parts, tmp_path, steps=9, evals=EVERY_STEP, checkpoints=manager, resume_state=state)
    assert parts.metrics[3]["eval/accuracy"] == 0.5
    position = ranks.states[-1].position
    assert position.unevaluated_metrics is None
    assert position.accuracies == (*state.accuracies, 0.5)


def test_a_resumed_run_that_must_stop_at_once_still_owes_the_evaluation(tmp_path: Path) -> None:
    state = position_of_a_stopped_run(tmp_path)
    stop = make_stop_request()
    stop.handle_signal(signal.SIGUSR1)
    ranks = FakeRanks()
    parts = ScriptedParts()
    manager = make_manager(ranks, stop)
    with fails(ExitCode.REQUEUE, match="after step 3"):
        lead(parts, tmp_path, steps=9, evals=EVERY_STEP, checkpoints=manager, resume_state=state)
    assert not any(call.startswith("evaluate") for call in parts.calls)
    assert ranks.states[-1].position.unevaluated_metrics == state.unevaluated_metrics


def test_the_last_step_is_saved_if_its_evaluation_fails_after_a_stop_request(
    tmp_path: Path,
) -> None:
    stop = make_stop_request()
    ranks = FakeRanks()
    parts = parts_whose_evaluation_fails(3, on_train=stop_at_step(stop, 3))
    manager = make_manager(ranks, stop)
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, steps=3, evals=EVERY_STEP, checkpoints=manager)
    assert ranks.steps == [2, 3]


def test_a_phase_that_ends_the_run_is_saved_if_its_evaluation_fails_after_a_stop_request(
    tmp_path: Path,
) -> None:
    phase = "{name: only, until: {steps: 3}}"
    phases = phases_of(
        configuration_of(["selection=belief", "eval.every=1", f"curriculum=[{phase}]"])
    )
    stop = make_stop_request()
    ranks = FakeRanks()
    parts = parts_whose_evaluation_fails(3, on_train=stop_at_step(stop, 3))
    manager = make_manager(ranks, stop)
    with fails(ExitCode.ENGINE_FAILED):
        lead(parts, tmp_path, steps=9, evals=EVERY_STEP, phases=phases, checkpoints=manager)
    assert ranks.steps == [2, 3]
    position = ranks.states[-1].position
    assert position.unevaluated_metrics is not None
    assert position.features["curriculum"]["tokens"] == 24


def test_the_accuracy_of_an_evaluation_whose_set_failed_counts_once(tmp_path: Path) -> None:
    class FailingSet:
        settings = EvalSettings(every=1)

        def sample(self, label: str) -> Any:
            raise Failure("too many responses are lost", ExitCode.ENGINE_FAILED)

    ranks = FakeRanks()
    with fails(ExitCode.ENGINE_FAILED):
        lead(
            ScriptedParts(accuracies=[0.3]),
            tmp_path,
            steps=9,
            evals={"every": 2, "start_step": 2},
            sets={"hard": FailingSet()},
            checkpoints=make_manager(ranks),
        )
    assert ranks.states[-1].position.unevaluated_metrics is not None
    assert ranks.states[-1].position.accuracies == ()


def parts_that_stop(
    stop: StopRequest, now: list[float], label_to_stop_at: str, **options: Any
) -> ScriptedParts:
    """Parts that get a SIGTERM while they measure `label_to_stop_at`, and wait for too long."""

    def abort(label: str) -> None:
        if label == label_to_stop_at:
            stop.handle_signal(signal.SIGTERM)
            now[0] = 5.5
            stop.check_deadline()

    parts = ScriptedParts(**options)
    parts.on_measure = abort
    return parts


@pytest.mark.parametrize("step", [0, 1, 3, 9])
def test_a_stop_request_aborts_an_evaluation_and_a_resumed_run_makes_up_for_it(
    tmp_path: Path, step: int
) -> None:
    """Also for step 0, which no checkpoint can hold, and for the last step."""
    now = [0.0]
    stop = make_stop_request(clock=lambda: now[0])
    ranks = FakeRanks()
    parts = parts_that_stop(stop, now, str(step))
    manager = make_manager(ranks, stop, checkpoint_every=100)
    options: dict[str, Any] = {"steps": 9, "evals": EVERY_STEP}
    with fails(ExitCode.REQUEUE, match=f"after step {step}"):
        lead(parts, tmp_path, checkpoints=manager, **options)
    assert ranks.steps == [step]
    state = ranks.states[-1].position
    assert state.unevaluated_metrics is not None
    assert len(state.accuracies) == step, "one for each evaluation that ended"
    assert "eval/accuracy" not in parts.metrics[step]
    resumed = lead(ScriptedParts(), tmp_path, resume_state=state, **options)
    assert resumed.metrics[step]["eval/accuracy"] == 0.5
    assert resumed.metrics[step]["sync/version"] == step
    metrics = parts.metrics | resumed.metrics
    assert [metrics[number]["eval/accuracy"] for number in range(10)] == [0.5] * 10
    assert [metrics[number]["rollout/tokens"] for number in range(1, 10)] == [8] * 9


def test_a_stop_request_aborts_the_second_set_of_an_evaluation(tmp_path: Path) -> None:
    now = [0.0]
    stop = make_stop_request(clock=lambda: now[0])

    class SlowSet:
        settings = EvalSettings(every=1)

        def sample(self, label: str) -> Any:
            stop.handle_signal(signal.SIGTERM)
            now[0] = 5.5
            stop.check_deadline()

    ranks = FakeRanks()
    manager = make_manager(ranks, stop)
    sets: dict[str, Any] = {"slow": SlowSet()}
    with fails(ExitCode.REQUEUE, match="after step 0"):
        lead(
            ScriptedParts(),
            tmp_path,
            steps=9,
            evals=EVERY_STEP,
            sets=sets,
            checkpoints=manager,
        )
    position = ranks.states[-1].position
    assert position.unevaluated_metrics is not None
    assert "eval/accuracy" not in position.unevaluated_metrics, "both sets are measured again"
    assert position.accuracies == ()


def test_an_owed_evaluation_that_a_stop_request_aborts_is_owed_on(tmp_path: Path) -> None:
    state = position_of_a_stopped_run(tmp_path)
    now = [0.0]
    stop = make_stop_request(clock=lambda: now[0])
    ranks = FakeRanks()
    parts = parts_that_stop(stop, now, "3")
    manager = make_manager(ranks, stop)
    with fails(ExitCode.REQUEUE, match="after step 3"):
        lead(parts, tmp_path, steps=9, evals=EVERY_STEP, checkpoints=manager, resume_state=state)
    assert ranks.states[-1].position.unevaluated_metrics == state.unevaluated_metrics
    assert parts.metrics[3]["rollout/tokens"] == 8


def test_tokens_of_a_phase_count_once_if_a_stop_request_aborts_its_evaluation(
    tmp_path: Path,
) -> None:
    phases = phases_of(
        configuration_of(["selection=belief", "eval.every=1", "curriculum=[{name: only}]"])
    )
    now = [0.0]
    stop = make_stop_request(clock=lambda: now[0])
    ranks = FakeRanks()
    options: dict[str, Any] = {"evals": EVERY_STEP, "phases": phases}
    with fails(ExitCode.REQUEUE):
        manager = make_manager(ranks, stop)
        parts = parts_that_stop(stop, now, "3")
        lead(parts, tmp_path, steps=9, checkpoints=manager, **options)
    state = ranks.states[-1].position
    assert state.features["curriculum"]["tokens"] == 24
    resumed_parts = lead(ScriptedParts(), tmp_path, steps=4, resume_state=state, **options)
    assert resumed_parts.metrics[4]["phase/tokens"] == 32
