"""mode=eval: rank 0 measures what engines answer to sets of questions, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.engines.weight_sync import NamedTensors, WeightSync
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import SavedWeights
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.job import Job
from megatron_rl.mcore.weights import rounded
from megatron_rl.models.shape import ModelShape
from megatron_rl.records.run_records import RunRecords
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.evaluation import Accuracy, Evaluation, accuracy_of
from megatron_rl.rollouts.pass_at_k import pass_rates
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.run.checkpoints.resume import explained_load_errors
from megatron_rl.training.dispatcher import Dispatcher


@dataclass(frozen=True)
class SetResult:
    """What was measured on one set. passes: pass@k with half the width of its interval, by k."""

    name: str
    accuracy: Accuracy
    passes: Mapping[int, tuple[float, float]]

    def metrics(self) -> dict[str, float]:
        """`eval/NAME/accuracy`, `eval/NAME/pass@4`, ... and their intervals."""
        values = {
            key.removeprefix("eval/"): value for key, value in self.accuracy.metrics().items()
        }
        for k, (rate, half_width) in self.passes.items():
            values |= {f"pass@{k}": rate, f"pass@{k}_ci95": half_width}
        return {f"eval/{self.name}/{key}": value for key, value in values.items()}


@dataclass(frozen=True)
class EvaluationRun:
    """Rank 0 of mode=eval.

    weights: sent to the engines first, None where they hold what is measured.
    """

    sets: Mapping[str, Evaluation]
    weights: WeightSync | None
    dispatcher: Dispatcher
    queue: RolloutQueue
    records: RunRecords

    def lead(self) -> None:
        """Measure every set, write the metrics and print a table; then every rank ends."""
        values: dict[str, float] = {}
        try:
            values |= send_first(self.weights, self.dispatcher, self.queue)
            results = [
                self._measured(name, evaluation, values) for name, evaluation in self.sets.items()
            ]
        finally:
            self.records.metrics.write(0, values)
        self.dispatcher.finish()
        self.queue.stop()
        for line in table(results):
            self.records.progress.log(line)

    def _measured(self, name: str, evaluation: Evaluation, values: dict[str, float]) -> SetResult:
        settings, watch = evaluation.settings, Stopwatch()
        with watch.section(f"eval/{name}"), self.records.progress.task(f"measuring {name}"):
            groups = evaluation.draw(name)
        samples, most = settings.samples_per_prompt, settings.max_rejected_share
        accuracy = accuracy_of(groups, samples, max_rejected_share=most)
        result = SetResult(name, accuracy, pass_rates(groups, samples))
        values |= result.metrics() | watch.seconds
        return result


def send_first(
    weights: WeightSync | None, dispatcher: Dispatcher, queue: RolloutQueue
) -> dict[str, float]:
    """Bring the engines to the weights that are measured, and return what that took; None: they
    hold them.
    """
    if weights is None:
        return {}
    command = weights.next_command()
    values: dict[str, float] = dispatcher.run(command)
    queue.set_version(command.version)
    return values


def table(results: list[SetResult]) -> list[str]:
    """A line for each set under a heading; ± is half of a 95 % interval, clustered by question."""
    heads = [
        "set",
        "questions",
        f"avg@{results[0].accuracy.samples // results[0].accuracy.questions}",
    ]
    rows = [[*heads, *(f"pass@{k}" for k in results[0].passes), "parseable", "lost"]]
    for result in results:
        found = result.accuracy
        rates = [(found.accuracy, found.half_width), *result.passes.values()]
        cells = [f"{rate:.3f} ± {half_width:.3f}" for rate, half_width in rates]
        rows.append(
            [
                result.name,
                str(found.questions),
                *cells,
                f"{found.parseable:.1%}",
                str(found.rejected),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def open_weights(
    c: Configuration, shape: ModelShape, checkpoint: Path, job: Job
) -> Callable[[], NamedTensors]:
    """The weights of a checkpoint as engines take them, a bucket in memory at a time (a
    collective).

    Raises `CheckpointUnusable`, also while they are read.
    """
    parallel.initialize(ParallelSettings(timeout_s=c.parallel.timeout_s), seed=c.seed, job=job)
    with explained_load_errors(checkpoint):
        saved = SavedWeights(checkpoint, shape, c.model, bucket_bytes=int(c.sync.bucket_mb * 2**20))

    def weights() -> NamedTensors:
        with explained_load_errors(checkpoint):
            yield from rounded(saved.all(torch_dtype(c.engine.dtype)), c.engine.fake_quant)

    return weights
