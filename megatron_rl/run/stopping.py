"""Conditions that end a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_rl.config.schema import EvalSettings, TrainSettings


def reached(accuracies: Sequence[float], settings: EvalSettings) -> bool:
    """Whether the mean of the last `eval.stop_average` evaluations is what the run was to stop at."""
    if settings.stop_at is None or len(accuracies) < settings.stop_average:
        return False
    return fmean(list(accuracies)[-settings.stop_average :]) >= settings.stop_at


def ended_by(
    step: int, accuracies: Sequence[float], train: TrainSettings, evals: EvalSettings
) -> str:
    """The key that leaves a run nothing to train after a step; empty where there is more."""
    if step >= train.total_steps:
        return "train.total_steps"
    return "eval.stop_at" if reached(accuracies, evals) else ""
