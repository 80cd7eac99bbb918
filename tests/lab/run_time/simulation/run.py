"""A simulated run: the loop of rank 0 with the rules of rollouts/steps, on simulated machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group as RolloutGroup
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.engines.on_update import OnUpdate, open_steps_ahead
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from tests.lab.run_time.simulation.cluster import Cluster, Group, Machines
from tests.lab.run_time.simulation.engine import Response
from tests.lab.run_time.simulation.lengths import Workload


@dataclass(frozen=True, kw_only=True)
class TrainerSpeed:
    """The seconds of a trainer that nothing slows down.

    step, token: of training on a step, and on each sampled token. sync: of a sync, and of all else
    during which engines rest. interrupt: to stop responses that are running.
    """

    step: float = 0.0
    token: float = 0.0
    sync: float = 0.0
    interrupt: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The times of a step, in seconds since the start of the run.

    start: the engines have the weights of the step before. taken_at: its rollouts are there.
    trained_at: the trainer is done. rest_at: the engines work on nothing. end: they have the
    weights of this step. tokens: sampled for it. ages: its tokens by age in versions.
    """

    step: int
    start: float
    taken_at: float
    trained_at: float
    rest_at: float
    end: float
    tokens: int
    ages: Counter[int]

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return self.end - self.start


@dataclass(frozen=True)
class SimulatedRun:
    """A run that was simulated.

    responses: of all steps. num_sampled: tokens that engines sampled. num_read: tokens of
    prompts and partial responses that they read. num_retractions: of responses, because a cache was
    full. busy_seconds: of all engines.
    """

    steps: Sequence[StepTime]
    responses: Sequence[Response]
    num_sampled: int
    num_read: int
    num_retractions: int
    busy_seconds: float

    def seconds_a_step(self, first: int = 2, last: int | None = None) -> float:
        """Return the mean over some steps, both ends included.

        last: None: the one before the last, because nothing is sampled during the last one.
        """
        end = len(self.steps) - 1 if last is None else last
        return fmean(step.seconds for step in self.steps[first - 1 : end])


def simulate(
    settings: RolloutSettings,
    workload: Workload,
    machines: Machines,
    trainer: TrainerSpeed,
    num_steps: int,
) -> SimulatedRun:
    """Simulate a run. It depends on its arguments alone.

    settings: `max_staleness`, `on_update` and `max_new_tokens` count, the last one only in engines
    whose caches have a limit.

    Raises ValueError for settings that a run refuses.
    """
    _check(settings, num_steps)
    cluster = Cluster(machines)
    source = _SimulatedSource(cluster, workload, settings.max_new_tokens)
    control: Any = _SimulatedControl(cluster, trainer.interrupt)
    steps_ahead, on_update = open_steps_ahead(settings, control, idle=lambda: None)
    loop = _SimulatedLoop(cluster, source, trainer, steps_ahead, on_update, num_steps)
    steps = [loop.run_step(step) for step in range(1, num_steps + 1)]
    return SimulatedRun(
        steps=steps,
        responses=[response for step in source.responses.values() for response in step],
        num_sampled=sum(engine.num_sampled for engine in cluster.engines),
        num_read=sum(engine.num_read for engine in cluster.engines),
        num_retractions=sum(engine.num_retractions for engine in cluster.engines),
        busy_seconds=sum(engine.busy_seconds for engine in cluster.engines),
    )


def _check(settings: RolloutSettings, num_steps: int) -> None:
    if settings.on_update != "wait" and not settings.max_staleness:
        raise ValueError(f"on_update={settings.on_update} needs max_staleness of at least 1")
    if num_steps <= settings.max_staleness:
        raise ValueError(
            f"a run of {num_steps} step(s) is too short for max_staleness={settings.max_staleness}"
        )


@dataclass
class _SimulatedLoop:
    """The loop of rank 0, as in run/loop/leader.py."""

    cluster: Cluster
    source: _SimulatedSource
    trainer: TrainerSpeed
    steps_ahead: StepsAhead
    on_update: OnUpdate
    num_steps: int
    version: int = 0

    def run_step(self, step: int) -> StepTime:
        start = self.cluster.now
        self.steps_ahead.begin_open(step, self.num_steps, self.source)
        batch = self.steps_ahead.take(step, self.source)
        taken_at = self.cluster.now
        self.steps_ahead.begin_next(step, self.num_steps, self.source)
        tokens = batch.generated_tokens
        self.cluster.train(self.trainer.step + self.trainer.token * tokens)
        trained_at = self.cluster.now
        ages = self._ages(step)
        self.on_update.before_sync(self.source)
        rest_at = self.cluster.now
        self.cluster.rest(self.trainer.sync)
        self.version += 1
        self.cluster.set_version(self.version)
        self.on_update.after_sync(self.source)
        return StepTime(
            step=step,
            start=start,
            taken_at=taken_at,
            trained_at=trained_at,
            rest_at=rest_at,
            end=self.cluster.now,
            tokens=tokens,
            ages=ages,
        )

    def _ages(self, step: int) -> Counter[int]:
        """Count the tokens of a step by age. Raises RuntimeError for one above the bound."""
        ages = Counter[int]()
        for response in self.source.responses[step]:
            for version, tokens in response.by_version.items():
                ages[self.version - version] += tokens
        if max(ages) > self.steps_ahead.max_staleness:
            raise RuntimeError(f"step {step} trained tokens of age {max(ages)}")
        return ages


@dataclass
class _SimulatedSource:
    """Supplies the batches of steps from simulated engines.

    limit: tokens of a response. responses: by step that has begun.
    """

    cluster: Cluster
    workload: Workload
    limit: int
    responses: dict[int, list[Response]] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)

    @property
    def open_steps(self) -> tuple[int, ...]:
        return tuple(self._open)

    def begin_step(self, step: int) -> None:
        groups = []
        expectations = self.workload.expectations(step)
        for index, lengths in enumerate(self.workload.lengths(step)):
            responses = [
                Response(
                    (step, index, sample),
                    self.workload.prompt_tokens,
                    length,
                    expectations[index][sample],
                    self.limit,
                )
                for sample, length in enumerate(lengths)
            ]
            groups.append(Group(responses))
        self._open.append(step)
        self.responses[step] = [response for group in groups for response in group.responses]
        self.cluster.request(groups)

    def finish_step(self, can_continue: Callable[[], bool] | None = None) -> RolloutBatch | None:
        step = self._open[0]
        open_responses = list(self.responses[step])

        def is_over() -> bool:
            while open_responses and open_responses[-1].is_complete:
                open_responses.pop()
            return not open_responses

        self.cluster.wait(is_over)
        self._open.pop(0)
        tokens = sum(response.num_tokens for response in self.responses[step])
        return RolloutBatch(groups=(), generated_tokens=tokens)

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        return batch

    def require(self, step: int, batch: RolloutBatch) -> None:
        raise RuntimeError("a simulated group is not sampled again")

    def count_tokens(self) -> int:
        return sum(engine.num_sampled for engine in self.cluster.engines)

    def state(self) -> SelectorState:
        return SelectorState(prompts=PromptCursor(epoch=0, position=0, digest=""))

    def drop_open(self) -> int:
        raise RuntimeError("a simulated run does not drop steps")

    def restore(self, state: SelectorState) -> None:
        raise RuntimeError("a simulated run does not drop steps")

    def open_groups(self, partials: Sequence[RolloutGroup]) -> dict[int, tuple[RolloutGroup, ...]]:
        raise RuntimeError("a simulated run saves no checkpoint")


@dataclass(frozen=True)
class _SimulatedControl:
    """Stops and continues the responses of simulated engines, as `EngineConnections` does."""

    cluster: Cluster
    interrupt_seconds: float

    def can_sample(self) -> bool:
        return True

    def interrupt(self, idle: Callable[[], None]) -> int:
        if self.cluster.interrupt():
            self.cluster.rest(self.interrupt_seconds)
        return 0

    def proceed(self) -> None:
        self.cluster.proceed()
