"""Reads when the steps of a real run were sampled, trained and synced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.past_run import Record, RunUnreadable, read_metrics, read_settings
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Lane, Span, read_timeline

# Steps before it do not count: the first ones also compile, load and fill caches
FIRST_STEP = 3


class CannotFit(Failure):
    """A run cannot be compared with a simulation."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class MeasuredGroup:
    """A group of a step. end: in seconds since the end of the sync before that step."""

    tokens: int
    end: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step of a run. Times are in seconds since the end of the sync before it.

    trained_at: the trainer was done. next_rollouts: the seconds after that until the engines were
    at rest. end: of the sync. groups: by prompt. is_sampling: responses of any step were open when
    the trainer was done.
    """

    step: int
    trained_at: float
    next_rollouts: float
    end: float
    groups: Sequence[MeasuredGroup]
    is_sampling: bool

    @property
    def sampled_at(self) -> float:
        """The time at which its last group was complete. Negative for a step sampled ahead."""
        return max(group.end for group in self.groups)

    @property
    def taken_at(self) -> float:
        """The time at which rank 0 had its rollouts."""
        return max(0.0, self.sampled_at)

    @property
    def training(self) -> float:
        """The seconds of training, with all that rank 0 computes before it."""
        return self.trained_at - self.taken_at

    @property
    def rest(self) -> float:
        """The seconds in which engines are at rest."""
        return self.end - self.trained_at - self.next_rollouts

    @property
    def tokens(self) -> int:
        """The number of tokens that were sampled for it."""
        return sum(group.tokens for group in self.groups)


@dataclass(frozen=True)
class MeasuredRun:
    """A run. steps: from `FIRST_STEP` to the one before the last."""

    name: str
    rollout: RolloutSettings
    max_running: int
    num_steps: int
    steps: Sequence[MeasuredStep]

    @property
    def seconds_a_step(self) -> float:
        """The mean over the steps."""
        return fmean(step.end for step in self.steps)

    @property
    def standard_error(self) -> float:
        """The standard error of that mean, as if steps were independent."""
        return stdev(step.end for step in self.steps) / len(self.steps) ** 0.5

    @property
    def size(self) -> tuple[int, int]:
        """The prompts of a step, and the samples of each."""
        return self.rollout.prompts_per_step, self.rollout.samples_per_prompt

    def repeats(self, other: MeasuredRun) -> bool:
        """True if another run did the same work, but for the seed."""
        return (
            self.rollout == other.rollout
            and self.max_running == other.max_running
            and self.num_steps == other.num_steps
        )


def read_run(directory: Path) -> MeasuredRun:
    """Read the directory of a run. Raises `RunUnreadable` and `CannotFit`."""
    settings = read_settings(directory)
    _check(directory, settings)
    records = {int(record["step"] or 0): record for record in read_metrics(directory)}
    num_steps = max(records, default=0)
    if num_steps < FIRST_STEP + 2:
        raise CannotFit(
            f"{directory} has {num_steps} step(s). A run needs at least {FIRST_STEP + 2}: "
            f"steps {FIRST_STEP} to the one before the last are compared"
        )
    spans = _read_spans(directory)
    steps = [_read_step(directory, i, spans, records) for i in range(FIRST_STEP, num_steps)]
    keys = ("max_new_tokens", "prompts_per_step", "samples_per_prompt", "max_staleness")
    rollout = RolloutSettings(
        **{key: settings[f"rollout.{key}"] for key in keys},
        on_update=settings["rollout.on_update"],
    )
    return MeasuredRun(
        name=directory.name,
        rollout=rollout,
        max_running=settings["engine.max_running_requests"],
        num_steps=num_steps,
        steps=steps,
    )


def _check(directory: Path, settings: Mapping[str, Any]) -> None:
    """Refuse runs that do what is not simulated."""
    needs = {
        "mode": "train",
        "selection.name": "uniform",
        "engine.urls": [],
        "engine.count": 1,
        "eval.every": 0,
        "run.checkpoint_every": 0,
    }
    for key, value in needs.items():
        if settings[key] != value:
            raise CannotFit(
                f"{directory} has {key}={settings[key]}: constants are fitted to runs with one "
                f"engine that sample, train and sync alone. Use {key}={value}"
            )


def _read_spans(directory: Path) -> list[Span]:
    file = directory / TIMELINE_FILE
    try:
        return list(read_timeline(file))
    except OSError as error:
        raise RunUnreadable(
            f"{file} cannot be read ({error}). Give the directory of a run"
        ) from error


def _read_step(
    directory: Path, step: int, spans: Sequence[Span], records: Mapping[int, Record]
) -> MeasuredStep:
    train = _command(spans, "train", step)
    syncs = [span for span in spans if span.lane is Lane.RANKS and span.name == "sync"]
    groups = [span for span in spans if span.lane is Lane.ROLLOUTS and span.step == step]
    record = records.get(step)
    # The first sync precedes step 1
    if train is None or len(syncs) <= step or not groups or record is None:
        raise RunUnreadable(f"{directory}: step {step} is not whole in its timeline and metrics")
    start = syncs[step - 1].end
    return MeasuredStep(
        step=step,
        trained_at=train.end - start,
        next_rollouts=record.get("time/next_rollouts") or 0.0,
        end=syncs[step].end - start,
        groups=[
            MeasuredGroup(span.tokens, span.end - start) for span in sorted(groups, key=_request)
        ],
        is_sampling=_is_sampling(spans, train.end),
    )


def _command(spans: Sequence[Span], name: str, step: int) -> Span | None:
    """Find what the ranks did in a step."""
    for span in spans:
        if span.lane is Lane.RANKS and span.name == name and span.step == step:
            return span
    return None


def _request(group: Span) -> int:
    """The place of a group in the order of requests."""
    return int(group.name.split("-")[2])


def _is_sampling(spans: Sequence[Span], time: float) -> bool:
    """True if a group is being sampled at a time."""
    return any(span.lane is Lane.ROLLOUTS and span.start < time < span.end for span in spans)
