"""Checkpoints of a leader while rollouts of later steps are open."""

from __future__ import annotations

import io
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.config.curriculum import phases_of
from megatron_rl.contracts.commands import Checkpoint, Command
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import LoopState, SelectorState
from megatron_rl.engines.fleet import NoEngineLeft
from megatron_rl.engines.token_counter import TokenComparison
from megatron_rl.rollouts.queue import CollectorFailed
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.steps_ahead import SecondsToStop, StepsAhead, StepSource
from megatron_rl.rollouts.wire.store import NOT_STORED
from megatron_rl.run.checkpoints.rollouts import read_local_batches
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.supervision.stop_request import StopRequest, WaitAborted
from tests.support import leaders
from tests.support.checkpoint_managers import FakeRanks, make_manager, make_stop_request
from tests.support.configurations import configuration_of
from tests.support.failures import fails
from tests.support.groups import group
from tests.support.leaders import ScriptedParts, lead

OPEN = (group(1.0, 0.0, name="open"),)


@dataclass
class StoredResponses:
    """Stores groups of open steps in each checkpoint, and notes the calls.

    num_new_tokens: tokens of each save that no record has yet. failure: raised by each save.
    open_groups: the sampled parts of open steps, by step.
    """

    num_new_tokens: int = 0
    failure: Exception | None = None
    is_quiet: bool = False
    num_uncounted: int = 0
    calls: list[str] = field(default_factory=list)
    seconds_to_stop: list[float | None] = field(default_factory=list)
    open_groups: dict[int, tuple[Group, ...]] = field(default_factory=lambda: {7: OPEN, 8: OPEN})

    def before_sync(self, source: StepSource) -> int:
        num_tokens = self.num_uncounted
        self.num_uncounted = 0
        return num_tokens + 8

    def after_sync(self, source: StepSource) -> None: ...

    def before_save(
        self, source: StepSource, seconds_to_stop: SecondsToStop
    ) -> Mapping[int, tuple[Group, ...]]:
        self.calls.append("save" if seconds_to_stop() is None else "stop")
        self.seconds_to_stop.append(seconds_to_stop())
        if self.failure is not None:
            raise self.failure
        self.num_uncounted += self.num_new_tokens
        return self.open_groups

    def after_save(self) -> None:
        self.calls.append("free")


def test_a_checkpoint_holds_what_there_is_of_open_steps(tmp_path: Path) -> None:
    ranks = FakeRanks()
    on_update = StoredResponses(num_new_tokens=3)
    lead(
        ScriptedParts(),
        tmp_path,
        steps=4,
        checkpoints=make_manager(ranks),
        on_update=on_update,
    )
    assert on_update.calls == ["save", "free"] * 2
    for state, batches in zip(ranks.states, ranks.batches, strict=True):
        assert state.position.open_steps == (7, 8)
        assert [(batch.step, batch.is_open, batch.groups) for batch in batches] == [
            (7, True, OPEN),
            (8, True, OPEN),
        ]
        assert state.position.features["token_audit"] == {"uncompared_tokens": 3}


def test_the_next_record_counts_tokens_that_were_sampled_before_the_checkpoint(
    tmp_path: Path,
) -> None:
    ranks = FakeRanks()
    lead(
        ScriptedParts(),
        tmp_path,
        steps=2,
        checkpoints=make_manager(ranks),
        on_update=StoredResponses(num_new_tokens=3),
    )
    comparisons: list[TokenComparison | None] = [None, TokenComparison(20, 1)]
    parts = ScriptedParts(comparisons=comparisons)
    lead(
        parts,
        tmp_path,
        steps=5,
        resume_state=ranks.states[0].position,
        on_update=StoredResponses(),
    )
    assert "account/engine_tokens" not in parts.metrics[3]
    assert parts.metrics[4]["account/engine_tokens"] == 3 + 20
    assert parts.metrics[4]["account/unaccounted"] == 1.0


@pytest.mark.parametrize("aborts_step", [False, True])
def test_a_stop_request_saves_open_rollouts_too(tmp_path: Path, aborts_step: bool) -> None:
    ranks = FakeRanks()
    stop = make_stop_request()

    def on_sample(step: int) -> None:
        if step == 3:
            stop.handle_signal(signal.SIGTERM)
            if aborts_step:
                raise WaitAborted

    on_update = StoredResponses()
    with fails(ExitCode.REQUEUE):
        lead(
            ScriptedParts(on_sample=on_sample),
            tmp_path,
            steps=9,
            checkpoints=make_manager(ranks, stop, checkpoint_every=100),
            on_update=on_update,
        )
    assert on_update.calls == ["stop", "free"]
    (seconds_to_stop,) = on_update.seconds_to_stop
    assert seconds_to_stop is not None and 0 < seconds_to_stop <= 10.0
    assert ranks.steps == [2 if aborts_step else 3]
    assert ranks.states[0].position.open_steps == (7, 8)
    assert len(ranks.batches[0]) == 2


@pytest.mark.parametrize("has_open_steps", [False, True])
def test_open_steps_are_saved_with_the_phase_that_began_them(
    tmp_path: Path, has_open_steps: bool
) -> None:
    """A stop request aborts the first step of a phase. Its open steps belong to this phase."""
    phase = "rollout.max_new_tokens: {}"
    phases = phases_of(
        configuration_of(
            [
                f"curriculum=[{{name: a, {phase.format(24)}, until: {{steps: 2}}}},"
                f"{{name: b, {phase.format(28)}}}]"
            ]
        )
    )
    ranks = FakeRanks()
    stop = make_stop_request()

    def on_sample(step: int) -> None:
        if step == 3:
            stop.handle_signal(signal.SIGTERM)
            raise WaitAborted

    open_groups = {3: OPEN, 4: OPEN} if has_open_steps else {}
    with fails(ExitCode.REQUEUE):
        lead(
            ScriptedParts(on_sample=on_sample),
            tmp_path,
            steps=9,
            phases=phases,
            checkpoints=make_manager(ranks, stop, checkpoint_every=100),
            on_update=StoredResponses(open_groups=open_groups),
        )
    position = ranks.states[0].position
    assert (position.step, position.open_steps) == (2, tuple(open_groups))
    assert position.features["curriculum"]["index"] == (1 if has_open_steps else 0)
    assert position.features["curriculum"]["tokens"] > 0


@pytest.mark.parametrize("open_steps", [(5, 6), ()])
def test_a_run_that_stops_before_its_first_step_keeps_the_open_steps_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_steps: tuple[int, ...]
) -> None:
    """The run starts from the checkpoint of another run. Without open steps it begins none."""
    steps_ahead = StepsAhead(1, continues_responses=True)
    steps_ahead.restore({}, open_steps, 9)
    monkeypatch.setattr(leaders, "StepsAhead", lambda max_staleness: steps_ahead)
    parts = ScriptedParts()
    selection = SelectorState(prompts=parts.cursor)
    position = LoopState(
        step=4, version=4, weights_synced=True, selection=selection, open_steps=open_steps
    )
    ranks = FakeRanks()
    stop = make_stop_request()
    stop.handle_signal(signal.SIGUSR1)
    with fails(ExitCode.REQUEUE):
        lead(
            parts,
            tmp_path,
            steps=9,
            resume_state=position,
            checkpoints=make_manager(ranks, stop, checkpoint_every=100),
            on_update=StoredResponses(open_groups=dict.fromkeys(open_steps, OPEN)),
        )
    assert parts.begun_steps == list(open_steps)
    assert ranks.states[0].position.open_steps == open_steps


class RanksOfTheNode(FakeRanks):
    """Read the rollouts of a checkpoint, as the ranks do before they write it."""

    def run(self, command: Command) -> SaveResult | None:
        result = super().run(command)
        assert isinstance(command, Checkpoint)
        try:
            read_local_batches(command.batches, 0)
        except OSError as problem:
            return SaveResult(command.step, f"rollouts: {problem}", lacks_rollouts=True)
        return result


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (None, r"asked to stop \(SIGUSR1\) before .*run\.resume=runs/old.*overwrite_failed"),
        (WaitAborted(), r"asked to stop \(SIGUSR1\) before .*run\.resume=runs/old"),
        (CollectorFailed("it is gone"), "it is gone"),
    ],
    ids=["setup", "wait", "collector"],
)
def test_a_run_that_ends_before_its_first_step_does_not_save_what_another_run_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Exception | None, reason: str
) -> None:
    """The rollouts of its first step are in the checkpoint of that run, and nowhere else."""
    steps_ahead = StepsAhead(1)
    saved_group = group(1.0, 0.0, name="saved")
    refs = [msgspec.structs.replace(ref, location=NOT_STORED) for ref in saved_group.rollouts]
    saved_group = msgspec.structs.replace(saved_group, rollouts=tuple(refs))
    steps_ahead.restore({5: RolloutBatch((saved_group,), 8)})
    monkeypatch.setattr(leaders, "StepsAhead", lambda max_staleness: steps_ahead)
    parts = ScriptedParts()
    stop = make_stop_request()

    def replace_lost(batch: RolloutBatch) -> RolloutBatch:
        if isinstance(end, WaitAborted):
            stop.handle_signal(signal.SIGUSR1)
        assert end is not None
        raise end

    monkeypatch.setattr(parts, "replace_lost", replace_lost)
    if end is None:
        stop.handle_signal(signal.SIGUSR1)
    selection = SelectorState(prompts=parts.cursor)
    position = LoopState(
        step=4, version=4, weights_synced=True, selection=selection, steps_ahead=(5,)
    )
    stream = io.StringIO()
    checkpoints = make_manager(
        RanksOfTheNode(), stop, stream=stream, checkpoint_every=100, resume="runs/old"
    )
    checkpoints.start_step = 4
    code = ExitCode.ENGINE_FAILED if isinstance(end, CollectorFailed) else ExitCode.REQUEUE
    with fails(code, match=reason):
        lead(parts, tmp_path, steps=9, resume_state=position, checkpoints=checkpoints)
    assert "cannot be saved" not in stream.getvalue()


FAILURES = [CollectorFailed("it is gone"), NoEngineLeft("every engine has left the run")]


@pytest.mark.parametrize("failure", FAILURES, ids=["collector", "engines"])
def test_open_rollouts_that_cannot_be_stored_prevent_no_checkpoint(
    tmp_path: Path, failure: Exception
) -> None:
    """The run ends after it, as it was to stop or by the failure."""
    ranks = FakeRanks()
    stop = make_stop_request()

    def on_train(step: int) -> None:
        stop.handle_signal(signal.SIGUSR1)

    on_update = StoredResponses(failure=failure)
    with fails(ExitCode.REQUEUE):
        lead(
            ScriptedParts(on_train=on_train),
            tmp_path,
            checkpoints=make_manager(ranks, stop, checkpoint_every=100),
            on_update=on_update,
        )
    assert (ranks.steps, ranks.states[0].position.open_steps) == ([1], ())
    ranks = FakeRanks()
    with pytest.raises(type(failure)):
        lead(
            ScriptedParts(),
            tmp_path,
            steps=5,
            checkpoints=make_manager(ranks),
            on_update=on_update,
        )
    assert (ranks.steps, ranks.states[0].position.open_steps) == ([2], ())
    assert on_update.calls == ["stop", "free", "save", "free"]


class SlowResponses(StoredResponses):
    """Waits in vain for the responses of later steps, before or after a sync."""

    def __init__(self, stop: StopRequest, now: list[float], place: str) -> None:
        super().__init__(open_groups={})
        self._stop = stop
        self._now = now
        self._place = place

    def before_sync(self, source: StepSource) -> int:
        if self._place == "before":
            self._wait()
        return super().before_sync(source)

    def after_sync(self, source: StepSource) -> None:
        if self._place == "after":
            self._wait()

    def _wait(self) -> None:
        self._stop.handle_signal(signal.SIGTERM)
        self._now[0] = 5.5
        self._stop.check_deadline()


@pytest.mark.parametrize("evals", [{}, {"every": 1}])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_stop_request_aborts_the_wait_for_later_steps_and_saves_the_trained_one(
    tmp_path: Path, place: str, evals: dict[str, int]
) -> None:
    now = [0.0]
    stop = make_stop_request(clock=lambda: now[0])
    ranks = FakeRanks()
    parts = ScriptedParts()
    with fails(ExitCode.REQUEUE, match="after step 1"):
        lead(
            parts,
            tmp_path,
            steps=9,
            evals=evals,
            checkpoints=make_manager(ranks, stop, checkpoint_every=100),
            on_update=SlowResponses(stop, now, place),
        )
    assert ranks.steps == [1]
    assert parts.metrics[1]["rollout/tokens"] == 8
    assert parts.metrics[1]["time/step"] > 0
    position = ranks.states[0].position
    assert (position.unevaluated_metrics is not None) == bool(evals)
    options: dict[str, Any] = {"steps": 2, "evals": evals, "resume_state": position}
    resumed = lead(ScriptedParts(), tmp_path, on_update=StoredResponses(), **options)
    assert resumed.calls[0] == "sync 1"
    assert "sample step-1" not in resumed.calls
    if evals:
        assert resumed.metrics[1]["eval/accuracy"] == 0.5


def test_tokens_of_a_step_whose_sync_was_aborted_are_compared_after_a_resume(
    tmp_path: Path,
) -> None:
    now = [0.0]
    stop = make_stop_request(clock=lambda: now[0])
    ranks = FakeRanks()
    on_update = SlowResponses(stop, now, "before")
    on_update.is_quiet = True
    manager = make_manager(ranks, stop, checkpoint_every=100)
    with fails(ExitCode.REQUEUE):
        lead(ScriptedParts(), tmp_path, steps=9, checkpoints=manager, on_update=on_update)
    assert ranks.states[0].position.features["token_audit"] == {"uncompared_tokens": 8}


@pytest.mark.parametrize(("staleness", "num_flushes"), [(0, 0), (1, 2)])
def test_requests_that_wait_are_sent_before_a_step_trains_if_later_steps_are_open(
    tmp_path: Path, staleness: int, num_flushes: int
) -> None:
    parts = ScriptedParts()
    on_train: list[int] = []
    parts.on_train = lambda step: on_train.append(parts.num_flushes - step)
    lead(parts, tmp_path, steps=2, max_staleness=staleness)
    assert parts.num_flushes == num_flushes
    assert on_train == ([0, 0] if staleness else [-1, -2])
