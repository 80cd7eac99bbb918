"""A leader over scripted parts, which note every call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, TextIO

import msgspec

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.curriculum import Phase
from megatron_rl.config.schema import (
    Configuration,
    CreditSettings,
    EngineSettings,
    EnvironmentSettings,
    EvalSettings,
    GuardSettings,
    ParallelSettings,
    RunSettings,
    TrainSettings,
)
from megatron_rl.contracts.commands import Command, EnterPhase, Save, Sync, Train
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import LoopState, PromptCursor, SelectorState
from megatron_rl.credit.assign import Credit
from megatron_rl.engines.on_update import OnUpdate, WaitForResponses
from megatron_rl.engines.token_counter import TokenComparison
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.run_records import RunRecords
from megatron_rl.rollouts.evaluation.evaluation import Accuracy
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.features.observer import Observer, Observers
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.features.registry import open_features
from megatron_rl.run.loop.build import build_leader
from megatron_rl.run.loop.leader import Leader
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.worker import LostRollouts, TrainOutcome
from tests.support.checkpoint_managers import FakeRanks, make_manager
from tests.support.configurations import configuration_of
from tests.support.groups import group


def ignore(step_or_label: object) -> None:
    """Do nothing."""


@dataclass(eq=False, kw_only=True)
class ScriptedParts:
    """All parts of a step in one object: notes each call in `calls`, and metrics by step.

    finite, accuracies: the outcome of each update and evaluation. num_lost: responses lost in each
    evaluation. on_sample, on_sample_again, on_train: called with the step. on_measure: called with
    the label.
    lost_rollouts: those that are gone at each attempt to train.
    norms: of the gradients of each trained step. One above the limit is a spike. Empty: no norm.
    """

    finite: Sequence[bool] = ()
    accuracies: Sequence[float | None] = ()
    groups: Sequence[Group] = ()
    num_lost: int = 0
    on_sample: Callable[[int], object] = ignore
    on_sample_again: Callable[[int], object] = ignore
    on_train: Callable[[int], object] = ignore
    on_measure: Callable[[str], object] = ignore
    lost_rollouts: Sequence[tuple[str, ...]] = ()
    norms: Sequence[float] = ()
    extra_metrics: dict[str, float] = field(default_factory=dict)
    comparisons: list[TokenComparison | None] = field(default_factory=list)

    cursor: PromptCursor = field(default=PromptCursor(epoch=0, position=0, digest="d"), init=False)
    version: int = field(default=-1, init=False)
    is_current: bool = field(default=False, init=False)
    calls: list[str] = field(default_factory=list, init=False)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict, init=False)
    released_groups: list[str] = field(default_factory=list, init=False)
    counted_tokens: list[int] = field(default_factory=list, init=False)
    begun_steps: list[int] = field(default_factory=list, init=False)
    train_versions: list[int | None] = field(default_factory=list, init=False)
    audits: list[int] = field(default_factory=list, init=False)
    num_refreshes: int = field(default=0, init=False)
    num_flushes: int = field(default=0, init=False)
    audit_obstacle = ""
    # The timeline asks the queue to tell it about arrivals
    queue: SimpleNamespace = field(default_factory=SimpleNamespace, init=False)
    _open_step: int | None = field(default=None, init=False)
    _num_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._finite = iter(self.finite)
        self._accuracies = iter(self.accuracies)
        self._lost_rollouts = iter(self.lost_rollouts)
        self._norms = iter(self.norms)
        self._groups = tuple(self.groups) or (group(1.0, 0.0, name="g"),)

    def state(self) -> SelectorState:
        return SelectorState(prompts=self.cursor)

    def restore(self, state: SelectorState) -> None:
        self.cursor = state.prompts

    def inflate_variance(self) -> None:
        self.calls.append("inflate_variance")

    def resume_from(self, version: int | None, *, is_synced: bool) -> None:
        assert version is not None
        self.version = version - 1 if is_synced else version

    @property
    def open_steps(self) -> tuple[int, ...]:
        return () if self._open_step is None else (self._open_step,)

    def begin_step(self, step: int) -> None:
        self._open_step = step
        self.begun_steps.append(step)

    def finish_step(self, can_continue: Callable[[], bool] | None = None) -> RolloutBatch:
        assert self._open_step is not None
        step = self._open_step
        self._open_step = None
        return self.sample(step)

    def drop_open(self) -> int:
        return 0

    def open_groups(self, partials: Sequence[Group]) -> dict[int, tuple[Group, ...]]:
        return {step: tuple(partials) for step in self.open_steps}

    def count_tokens(self) -> int:
        num_tokens = self._num_tokens
        self._num_tokens = 0
        return num_tokens

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        return batch

    def require(self, step: int, batch: RolloutBatch) -> None:
        pass

    def refresh(self) -> None:
        self.num_refreshes += 1

    def send_waiting(self) -> None:
        self.num_flushes += 1

    def count_in_flight(self) -> int:
        return 5

    def engines_idle_seconds(self) -> float:
        return 0.25

    def can_sample(self) -> bool:
        return True

    def sample(self, step: int) -> RolloutBatch:
        self.calls.append(f"sample step-{step}")
        self.on_sample(step)
        position = self.cursor.position + 1
        self.cursor = msgspec.structs.replace(self.cursor, position=position)
        self._num_tokens += 8
        return RolloutBatch(self._groups, 8, delivered_ids=tuple(g.group_id for g in self._groups))

    def sample_again(
        self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str]
    ) -> RolloutBatch:
        self.calls.append(f"sample again {','.join(rollout_ids)}")
        self.on_sample_again(step)
        return replace(batch, num_repeated=batch.num_repeated + len(rollout_ids))

    def measure(self, label: str) -> Accuracy:
        self.on_measure(label)
        self.calls.append(f"evaluate {label} at version {self.version}")
        return Accuracy(
            accuracy=next(self._accuracies, 0.5),
            half_width=0.1,
            parseable=0.5,
            ended_share=1.0,
            num_rejected=self.num_lost,
            questions=2,
            samples=8,
            tokens=5,
        )

    @property
    def token_counter(self) -> ScriptedParts:
        return self

    def compare(self, counted_tokens: int) -> TokenComparison | None:
        self.counted_tokens.append(counted_tokens)
        return self.comparisons.pop(0) if self.comparisons else None

    def expire(self) -> None:
        self.is_current = False

    def sleep(self) -> None:
        self.calls.append("sleep")

    def next_command(self) -> Sync:
        return Sync(version=self.version + 1)

    def run(self, command: Command) -> Any:
        match command:
            case Sync(version):
                self.calls.append(f"sync {version}")
                self.audits += [version] if command.audit else []
                return {"sync/version": float(version)}
            case Train(plan):
                self.calls.append(f"train {plan.step}")
                self.train_versions.append(command.version)
                self.on_train(plan.step)
                if lost_rollouts := next(self._lost_rollouts, ()):
                    return LostRollouts(lost_rollouts)
                is_finite = next(self._finite, True)
                return self._outcome(command, is_finite)
            case EnterPhase(index):
                self.calls.append(f"enter {index}")
            case Save(path):
                self.calls.append(f"save {path.rsplit('/', 1)[1]}")
        return None

    def _outcome(self, command: Train, is_finite: bool) -> TrainOutcome:
        norm = next(self._norms, None)
        limit = command.max_norm
        spike = norm if norm is not None and limit is not None and norm > limit else None
        is_applied = is_finite and spike is None
        return TrainOutcome(
            is_finite,
            len(command.plan.optimizer_steps) if is_applied else 0,
            MetricSums(),
            self.extra_metrics,
            norms=() if norm is None or not is_applied else (norm,),
            spike=spike,
        )

    def set_version(self, version: int) -> None:
        self.version = version
        self.is_current = True

    def release(self, group_ids: list[str]) -> None:
        self.released_groups += group_ids

    def finish(self) -> None:
        self.calls.append("finish")

    def stop(self) -> None:
        self.calls.append("stop")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.metrics[step] = dict(values)


def assemble(
    stand_in: Any,
    train: TrainSettings,
    credit: CreditSettings | None,
    sets: Mapping[str, Any],
    open_parts: Callable[[Configuration], StepParts],
) -> StepParts:
    """Return parts with real credit and plans. `stand_in` samples and evaluates."""
    return StepParts(
        rollouts=stand_in,
        credit=Credit(GrpoSettings(), credit),
        planner=StepPlanner(train, ParallelSettings(), dp_size=1, seed=0),
        evaluation=stand_in,
        open_parts=open_parts,
        sets=sets,
    )


_NO_GUARD = GuardSettings()
_ENGINE = EngineSettings()


def eval_settings(changes: dict[str, Any]) -> EvalSettings:
    return EvalSettings(**({"every": 0} | changes))


def train_settings(steps: int, changes: dict[str, Any]) -> TrainSettings:
    return TrainSettings(total_steps=steps, optimizer_steps_per_batch=1, **changes)


def lead(
    parts: ScriptedParts,
    tmp_path: Path,
    *,
    steps: int = 2,
    evals: dict[str, Any] | None = None,
    sets: Mapping[str, Any] = MappingProxyType({}),
    environment: str = "single_turn",
    stream: TextIO | None = None,
    checkpoints: CheckpointManager | None = None,
    resume_state: LoopState | None = None,
    credit: CreditSettings | None = None,
    phases: Sequence[Phase] = (),
    observers: Sequence[Observer] = (),
    guard: GuardSettings = _NO_GUARD,
    engine: EngineSettings = _ENGINE,
    max_staleness: int = 0,
    on_update: OnUpdate | None = None,
    **train: Any,
) -> ScriptedParts:
    """Run a leader over `parts` to its end, with the features of a run.

    sets: evaluations of sets by name. stream: takes the progress lines. observers: more features.
    on_update: None waits for responses.
    """
    stand_in: Any = parts
    settings = train_settings(steps, train)
    c = replace(
        _configuration(),
        train=settings,
        eval=eval_settings(evals or {}),
        environment=EnvironmentSettings(name=environment),  # type: ignore[arg-type]
        run=RunSettings(),
        guard=guard,
        engine=engine,
        curriculum=[_entry_of(phase) for phase in phases] or None,
    )

    def open_parts(c: Configuration) -> StepParts:
        parts.calls.append(f"open parts for {c.rollout.max_new_tokens} tokens")
        return step_parts

    step_parts = assemble(stand_in, settings, credit, sets, open_parts)
    progress = Progress(steps, is_enabled=stream is not None, stream=stream)
    directory = RunDirectory(tmp_path)
    checkpoints = checkpoints or make_manager(FakeRanks(), checkpoint_every=0)
    setup: Any = SimpleNamespace(
        configuration=c, job=SimpleNamespace(rank=0), directory=directory, progress=progress
    )
    features = open_features(
        FeatureParts(
            setup=setup,
            dispatcher=stand_in,
            worker=stand_in,
            connections=stand_in,
            metrics=stand_in,
            checkpoints=checkpoints,
            enter=contextlib.ExitStack().enter_context,
        )
    )
    ahead = StepsAhead(max_staleness)
    leader = build_leader(
        Leader,
        c,
        step_parts,
        holder=stand_in,
        sync=stand_in,
        steps_ahead=ahead,
        on_update=on_update or WaitForResponses(ahead, parts.can_sample),
        checkpoints=checkpoints,
        observers=Observers([*features, *observers]),
        dispatcher=stand_in,
        records=RunRecords(directory, stand_in, progress),
        state=resume_state,
    )
    leader.lead()
    return parts


def _entry_of(phase: Phase) -> dict[str, Any]:
    """Return the entry of a curriculum that makes this phase."""
    settings = phase.settings
    others = {"until": settings.until, "reset_certainty": settings.reset_certainty}
    return {"name": settings.name} | others | dict(phase.changes)


@functools.cache
def _configuration() -> Configuration:
    """A configuration whose optional features are off."""
    return configuration_of(["samples.every=0", "logger.tensorboard=false"])
