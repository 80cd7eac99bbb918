"""mode=eval: rank 0 measures the engines on sets of questions, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import SavedWeights
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.mcore.job import Job
from megatron_rl.mcore.weights import (
    complete,
    fp8_weights_of,
    quantize_weights,
)
from megatron_rl.models.shape import ModelShape
from megatron_rl.records.run_records import RunRecords
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.evaluation.evaluation import Evaluation
from megatron_rl.rollouts.evaluation.set_result import SetResult, measure_set
from megatron_rl.run.checkpoints.resume import explained_load_errors
from megatron_rl.run.modes.mode import Lead, LoopParts
from megatron_rl.training.dispatcher import Dispatcher
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.source import SoleSource, WeightSource


def evaluate(parts: LoopParts) -> Lead:
    """Make the loop that measures all sets."""
    assert parts.connections is not None
    return EvaluationRun(
        sets={
            name: open_evaluation(parts, prompts, name)
            for name, prompts in parts.setup.run_data.sets.items()
        },
        weights=weights_to_send(parts),
        dispatcher=parts.dispatcher,
        connections=parts.connections,
        records=parts.records,
    ).lead


@dataclass(frozen=True)
class EvaluationRun:
    """The loop of rank 0. weights: sent to the engines first; None where they hold them already."""

    sets: Mapping[str, Evaluation]
    weights: WeightSync | None
    dispatcher: Dispatcher
    connections: EngineConnections
    records: RunRecords

    def lead(self) -> None:
        """Measure every set, write the metrics and print a table; then end every rank."""
        values: dict[str, float] = {}
        try:
            with self.records.progress.task("sending the weights to the engines"):
                values |= send_first(self.weights, self.dispatcher, self.connections)
            results = [
                self._measure(name, evaluation, values) for name, evaluation in self.sets.items()
            ]
        finally:
            self.records.metrics.write(0, values)
        self.dispatcher.finish()
        self.connections.stop()
        for line in table(results):
            self.records.progress.log(line)

    def _measure(self, name: str, evaluation: Evaluation, values: dict[str, float]) -> SetResult:
        watch = Stopwatch()
        with watch.section(f"eval/{name}"):
            result = measure_set(name, evaluation, label=name)
        values |= result.metrics() | watch.seconds
        return result


def open_evaluation(parts: LoopParts, prompts: tuple[Prompt, ...], name: str = "") -> Evaluation:
    """Make the evaluation of one set of prompts. name: of a set with its own settings."""
    assert parts.connections is not None
    c = parts.setup.configuration
    return Evaluation(
        parts.connections.queue,
        prompts,
        c.eval.of_set(name) if name in c.eval.sets else c.eval,
        c.rollout,
        parts.setup.stop_token_ids,
        parts.idle,
    )


def weights_to_send(parts: LoopParts) -> WeightSync | None:
    """Return the weight sync when a checkpoint is measured.

    None: the engines load the weights of model.path themselves.
    """
    assert parts.connections is not None
    if parts.setup.resume_point.checkpoint is None:
        return None
    return parts.connections.weights


def send_first(
    weights: WeightSync | None, dispatcher: Dispatcher, connections: EngineConnections
) -> dict[str, float]:
    """Send the engines the weights that are measured; returns metrics. None: they hold them."""
    if weights is None:
        connections.fleet.admit_without_weights()
        return {}
    command = weights.next_command()
    values: dict[str, float] = dispatcher.run(command)
    connections.set_version(command.version)
    return values


def table(results: list[SetResult]) -> list[str]:
    """Return a heading and a line for each set.

    ± is half of a 95 % interval, clustered by question. A dash stands for an unknown value. There
    is no column of rewards if every set has a correctness.
    """
    ks = sorted({k for result in results for k in result.passes})
    has_reward = any(result.accuracy.reward is not None for result in results)
    heading = ["set", "questions", _average_heading(results)]
    heading += [f"pass@{k}" for k in ks]
    heading += ["reward"] if has_reward else []
    heading += ["parseable", "lost"]
    rows = [heading, *(_cells(result, ks, has_reward=has_reward) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heading))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _average_heading(results: list[SetResult]) -> str:
    """Return avg@n with the number of responses to a question, if all sets have the same."""
    counts = {result.accuracy.samples // result.accuracy.questions for result in results}
    return f"avg@{counts.pop()}" if len(counts) == 1 else "avg@n"


def _cells(result: SetResult, ks: list[int], *, has_reward: bool) -> list[str]:
    accuracy = result.accuracy
    cells = [_mean_cell(accuracy.accuracy, accuracy.half_width)]
    cells += [_mean_cell(*result.passes.get(k, (None, 0.0))) for k in ks]
    if has_reward:
        cells.append(_mean_cell(accuracy.reward, accuracy.reward_half_width))
    return [
        result.name,
        str(accuracy.questions),
        *cells,
        f"{accuracy.parseable:.1%}",
        str(accuracy.num_rejected),
    ]


def _mean_cell(mean: float | None, half_width: float) -> str:
    return "-" if mean is None else f"{mean:.3f} ± {half_width:.3f}"


def checkpoint_weights(
    c: Configuration, shape: ModelShape, checkpoint: Path, job: Job
) -> Callable[[], WeightSource]:
    """Open the weights of a checkpoint, a bucket in memory at a time (a collective).

    Rank 0 alone reads them. Raises `Failure`, also while they are read.
    """
    parallel.initialize(ParallelSettings(timeout_s=c.parallel.timeout_s), seed=c.seed, job=job)
    with explained_load_errors(checkpoint):
        bucket_bytes = int(c.sync.bucket_mb * 2**20)
        saved_weights = SavedWeights(checkpoint, shape, c.model, bucket_bytes=bucket_bytes)

    def weights() -> NamedTensors:
        with explained_load_errors(checkpoint):
            dtype = torch_dtype(c.engine.dtype)
            tensors = saved_weights.all(dtype)
            names = fp8_weights_of(c.engine, shape)
            if names is not None:
                tensors = complete(quantize_weights(tensors, names), names, dtype)
            yield from tensors

    source = SoleSource(weights if job.rank == 0 else partial(iter, ()), owns_any=job.rank == 0)
    return lambda: source
