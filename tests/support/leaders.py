"""A leader over stand-ins for all of its stages, which say when they are called."""

from collections.abc import Callable, Sequence
from typing import Any, TextIO

import msgspec

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.curriculum import Phase
from megatron_rl.config.schema import (
    Configuration,
    CreditSettings,
    EvalSettings,
    ParallelSettings,
    RolloutSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from megatron_rl.contracts.commands import Command, EnterPhase, Save, Sync, Train
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import LoopState, PromptCursor, SelectorState
from megatron_rl.credit.assign import Credit
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_records import RunRecords
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.rollouts.evaluation import Accuracy
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.curriculum import Curriculum
from megatron_rl.run.leader import Leader, Stages
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.worker import TrainOutcome
from tests.support.groups import group


class Stage:
    """All stages in one: notes each call in `said`."""

    def __init__(
        self,
        *,
        finite: Sequence[bool] = (),
        accuracies: Sequence[float] = (),
        groups: Sequence[Group] = (),
        lost: int = 0,
        on_draw: Callable[[int], object] = lambda step: None,
        on_train: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.cursor = PromptCursor(epoch=0, position=0, digest="d")
        self._lost = lost
        self._on_draw, self._on_train = on_draw, on_train
        self.said: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.released: list[str] = []
        self.version = -1
        self.audit_obstacle = ""
        self._finite, self._accuracies = iter(finite), iter(accuracies)
        self._groups = tuple(groups) or (group(1.0, 0.0, name="g"),)

    def state(self) -> SelectorState:
        return SelectorState(prompts=self.cursor)

    def restore(self, state: SelectorState) -> None:
        self.cursor = state.prompts

    def widen(self) -> None:
        self.said.append("widen")

    def resume_from(self, version: int | None, *, synced: bool) -> None:
        assert version is not None and synced
        self.version = version - 1

    def draw(self, step: int) -> RolloutBatch:
        self.cursor = msgspec.structs.replace(self.cursor, position=self.cursor.position + 1)
        self.said.append(f"draw step-{step}")
        self._on_draw(step)
        return RolloutBatch(
            self._groups, 8, delivered=tuple(group.group_id for group in self._groups)
        )

    def measure(self, label: str) -> Accuracy:
        self.said.append(f"evaluate {label} at version {self.version}")
        accuracy = next(self._accuracies, 0.5)
        return Accuracy(
            accuracy=accuracy,
            half_width=0.1,
            parseable=0.5,
            finished=1.0,
            rejections=self._lost,
            questions=2,
            samples=8,
            tokens=5,
        )

    def next_command(self) -> Sync:
        return Sync(version=self.version + 1)

    def run(self, command: Command) -> Any:
        match command:
            case Sync(version):
                self.said.append(f"sync {version}")
                return {"sync/version": float(version)}
            case Train(plan):
                self.said.append(f"train {plan.step}")
                self._on_train(plan.step)
                finite = next(self._finite, True)
                return TrainOutcome(
                    finite, len(plan.optimizer_steps) if finite else 0, MetricSums(), {}
                )
            case EnterPhase(index):
                self.said.append(f"enter {index}")
            case Save(path):
                self.said.append(f"save {path.rsplit('/', 1)[1]}")
        return None

    def set_version(self, version: int) -> None:
        self.version = version

    def release(self, group_ids: list[str]) -> None:
        self.released += group_ids

    def finish(self) -> None:
        self.said.append("finish")

    def stop(self) -> None:
        self.said.append("stop")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.logged[step] = dict(values)


def lead(
    stage: Stage,
    tmp_path: Any,
    *,
    steps: int = 2,
    evals: dict[str, Any] | None = None,
    when: str = "step",
    stream: TextIO | None = None,
    keeper: CheckpointManager | None = None,
    position: LoopState | None = None,
    credit: CreditSettings | None = None,
    course: Sequence[Phase] = (),
    **train: Any,
) -> Stage:
    settings = TrainSettings(total_steps=steps, optimizer_steps_per_batch=1, **train)
    stages = Stages(
        rollouts=stage,  # type: ignore[arg-type]
        credit=Credit(GrpoSettings(), credit, seed=0),
        planner=StepPlanner(settings, ParallelSettings(), dp_size=1, seed=0),
        evaluation=stage,  # type: ignore[arg-type]
    )

    def parts(c: Configuration) -> Stages:
        stage.said.append(f"parts for {c.rollout.max_new_tokens} tokens")
        return stages

    records = RunRecords(
        RunDirectory(tmp_path), stage, Progress(steps, enabled=stream is not None, stream=stream)
    )  # type: ignore[arg-type]
    leader = Leader(
        settings,
        RolloutSettings(max_new_tokens=4, prompts_per_step=1),
        EvalSettings(**({"every": 0} | (evals or {}))),
        SyncSettings(when=when),  # type: ignore[arg-type]
        RunSettings(),
        stages,
        stage,  # type: ignore[arg-type]
        stage,  # type: ignore[arg-type]
        stage,  # type: ignore[arg-type]
        records,
        keeper,
        Curriculum(course, parts, stage, records.progress.log) if course else None,  # type: ignore[arg-type]
    )
    if position is not None:
        leader.resume_from(position)
    leader.lead()
    return stage
