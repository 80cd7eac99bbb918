"""Evaluates steps, remembers an evaluation that is owed, and ends a run by accuracy."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from megatron_rl.config.schema import EvalSettings, TrainSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.records.progress import Progress
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.evaluation.evaluation import Evaluation
from megatron_rl.rollouts.evaluation.set_result import measure_set
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.end_conditions import (
    NUM_AVERAGED,
    accuracy_unknown,
    ending_key,
    is_accuracy_reached,
)
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.loop.engine_weights import EngineWeights
from megatron_rl.run.loop.sampling import Sampling
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.run.supervision.stop_request import WaitAborted
from sglang_bridge.errors import EngineError


class Evaluations:
    """Evaluates the steps that are due.

    owed_values: the metrics of the last step, if its evaluation is still to be done because a stop
    request or a failure prevented it.
    """

    def __init__(
        self,
        settings: EvalSettings,
        train: TrainSettings,
        parts: StepParts,
        *,
        sampling: Sampling,
        weights: EngineWeights,
        checkpoints: CheckpointManager,
        observers: Observers,
        progress: Progress,
    ) -> None:
        self.owed_values: dict[str, float] | None = None
        self._settings = settings
        self._train = train
        self._parts = parts
        self._sampling = sampling
        self._weights = weights
        self._checkpoints = checkpoints
        self._observers = observers
        self._progress = progress
        self._accuracies: deque[float] = deque()

    @property
    def accuracies(self) -> tuple[float, ...]:
        """All evaluations so far."""
        return tuple(self._accuracies)

    def restore(self, state: LoopState) -> None:
        """Go on where a run was saved."""
        self._accuracies = deque(state.accuracies)
        self.owed_values = _from_storable(state.unevaluated_metrics)

    def storable_owed_values(self) -> dict[str, float | None] | None:
        """Return `owed_values` for a checkpoint. JSON has no NaN and Inf: None stands for them."""
        if self.owed_values is None:
            return None
        return {
            name: value if math.isfinite(value) else None
            for name, value in self.owed_values.items()
        }

    def ending_key(self, step: int) -> str:
        """Return the key that ends the run with this step, or an empty string."""
        key = ending_key(step, self._accuracies, self._train, self._settings)
        return key or self._observers.ending_key(step)

    def before_first_step(self, values: dict[str, float]) -> None:
        """Evaluate step 0 of a new run, if that is due."""
        if not self._is_any_due(0):
            return
        if self._checkpoints.stop_requested or not self._evaluate_in_time(0, values):
            self.owed_values = dict(values)

    def make_up(self, step: int, values: dict[str, float]) -> None:
        """Make up for the evaluation of a step, which has been closed."""
        if self._evaluate_closed(step, values):
            self.owed_values = None

    def after_step(
        self, step: int, values: dict[str, float], on_failure: Callable[[int, str], None]
    ) -> None:
        """Evaluate a step that is trained, if that is due, and close it.

        A stop request postpones it, unless the run ends with the step. on_failure: called with the
        step and what failed, once `owed_values` holds the metrics.
        """
        is_done = self._evaluate_if_due(step, values, on_failure)
        values |= self._observers.close_step(values)
        if not is_done and step != self._train.total_steps and self.ending_key(step):
            with self._owed_on_failure(step, values, on_failure, is_closed=True):
                is_done = self._evaluate_closed(step, values)
        self.owed_values = None if is_done else dict(values)

    def postpone(self, step: int, values: Mapping[str, float]) -> None:
        """Close a step that cannot be evaluated. A resumed run makes up for it."""
        metrics = dict(values)
        metrics |= self._observers.close_step(metrics)
        self.owed_values = metrics if self._is_any_due(step) else None

    def ending_warning(self, step: int) -> str:
        """Return a warning for a run whose last step is below `eval.stop_at`, or ""."""
        stop_at = self._settings.stop_at
        if stop_at is None or is_accuracy_reached(self._accuracies, self._settings):
            return ""
        latest = list(self._accuracies)[-NUM_AVERAGED:]
        return (
            f"warning: eval.stop_at={stop_at:g} was not reached in {step} steps; "
            f"the last {len(latest)} evaluation(s) average {fmean(latest):.3f}"
        )

    def _evaluate_if_due(
        self, step: int, values: dict[str, float], on_failure: Callable[[int, str], None]
    ) -> bool:
        """Evaluate a step if that is due. Returns False if a stop request prevents it."""
        if not self._is_any_due(step):
            return True
        # After a stop request, the remaining time belongs to the checkpoint
        if step != self._train.total_steps and self._checkpoints.stop_requested:
            return False
        self._weights.send(values)
        with self._owed_on_failure(step, values, on_failure, is_closed=False):
            return self._evaluate_in_time(step, values)

    def _evaluate_closed(self, step: int, values: dict[str, float]) -> bool:
        """Evaluate a step whose tokens were counted.

        Returns False, and changes nothing, if a stop request aborts it.
        """
        if not self._evaluate_in_time(step, values):
            return False
        if step:
            values |= self._observers.close_step(values | {"rollout/tokens": 0.0})
        return True

    def _evaluate_in_time(self, step: int, values: dict[str, float]) -> bool:
        """Evaluate a step. Returns False, and changes nothing, if a stop request aborts it."""
        accuracies = self._accuracies.copy()
        metrics = dict(values)
        try:
            self._evaluate(step, values)
        except WaitAborted:
            self._accuracies = accuracies
            values.clear()
            values.update(metrics)
            self._progress.log(f"a stop request aborted the evaluation of step {step}")
            return False
        return True

    @contextlib.contextmanager
    def _owed_on_failure(
        self,
        step: int,
        values: dict[str, float],
        on_failure: Callable[[int, str], None],
        *,
        is_closed: bool,
    ) -> Iterator[None]:
        """Owe the evaluation if it fails. is_closed: the tokens of the step were counted."""
        metrics = dict(values)
        accuracies = self._accuracies.copy()
        try:
            yield
        except (Failure, EngineError):
            self._accuracies = accuracies  # a resumed run evaluates the step again
            if not is_closed:
                metrics |= self._observers.close_step(metrics)
            self.owed_values = metrics
            on_failure(step, f"the evaluation of step {step}")
            raise

    def _evaluate(self, step: int, values: dict[str, float]) -> None:
        """Send the weights, measure what is due after `step`, and add the metrics to `values`."""
        if self._parts.evaluation is None:
            return
        self._weights.send(values)
        if self._is_due(step, self._settings.every):
            self._measure(step, values, self._parts.evaluation)
        for name, evaluation in self._parts.sets.items():
            if self._is_due(step, evaluation.settings.every):
                self._measure_set(step, name, values, evaluation)
        self._observers.after_evaluation(values)
        values |= self._checkpoints.observe_evaluation(step, values)

    def _measure(self, step: int, values: dict[str, float], evaluation: Evaluation) -> None:
        watch = Stopwatch()
        with watch.section("eval"), self._checkpoints.abortable_wait():
            accuracy = evaluation.measure(str(step))
        values |= accuracy.metrics() | watch.seconds
        self._count(values, accuracy.tokens)
        self._progress.log(f"step {step}: held-out accuracy {accuracy}")
        if accuracy.accuracy is None:
            self._refuse_endings_by_accuracy()
        else:
            self._accuracies.append(accuracy.accuracy)

    def _measure_set(
        self, step: int, name: str, values: dict[str, float], evaluation: Evaluation
    ) -> None:
        watch = Stopwatch()
        with watch.section(f"eval/{name}"), self._checkpoints.abortable_wait():
            result = measure_set(name, evaluation, label=f"{step}-{name}")
        values |= result.metrics() | watch.seconds
        self._count(values, result.accuracy.tokens)
        self._progress.log(f"step {step}: accuracy of {name} {result.accuracy}")

    def _count(self, values: dict[str, float], tokens: int) -> None:
        """Add the tokens of an evaluation to the account."""
        for key in ("account/evaluation", "account/generated"):
            values[key] = values.get(key, 0.0) + tokens
        self._sampling.count_evaluation(tokens, values)

    def _refuse_endings_by_accuracy(self) -> None:
        """Raise `Failure` if the run, or a phase that is not over, ends by accuracy."""
        if self._settings.stop_at is not None:
            raise accuracy_unknown(f"eval.stop_at={self._settings.stop_at:g}")
        key = self._observers.accuracy_key()
        if key:
            raise accuracy_unknown(key)

    def _is_any_due(self, step: int) -> bool:
        if self._parts.evaluation is None:
            return False
        intervals = [evaluation.settings.every for evaluation in self._parts.sets.values()]
        return any(self._is_due(step, every) for every in (self._settings.every, *intervals))

    def _is_due(self, step: int, every: int) -> bool:
        """True if an evaluation with this interval follows `step`."""
        if step == self._train.total_steps:
            return True
        interval = every if step else 1
        return step >= self._settings.start_step and interval > 0 and step % interval == 0


def _from_storable(metrics: dict[str, float | None] | None) -> dict[str, float] | None:
    if metrics is None:
        return None
    return {name: math.nan if value is None else value for name, value in metrics.items()}
