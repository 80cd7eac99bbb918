"""Conditions that end a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_rl.config.schema import EvalSettings, TrainSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure

# A single evaluation may reach `eval.stop_at` by chance.
NUM_AVERAGED = 2


def accuracy_unknown(setting: str) -> Failure:
    """Return the refusal of a key that ends a run by accuracy, which the scorer does not give."""
    return Failure(
        f"{setting}: the evaluation has no accuracy, because the scorer gave no correctness "
        "for any response. Leave the key null, or return a correctness in Verdict",
        ExitCode.REFUSED,
    )


def is_accuracy_reached(accuracies: Sequence[float], settings: EvalSettings) -> bool:
    """True when the mean of the last `NUM_AVERAGED` evaluations is at `eval.stop_at`."""
    if settings.stop_at is None or len(accuracies) < NUM_AVERAGED:
        return False
    return fmean(list(accuracies)[-NUM_AVERAGED:]) >= settings.stop_at


def ending_key(
    step: int, accuracies: Sequence[float], train: TrainSettings, evals: EvalSettings
) -> str:
    """Return the key that ends the run after `step`; empty where there is more to train."""
    if step >= train.total_steps:
        return "train.total_steps"
    return "eval.stop_at" if is_accuracy_reached(accuracies, evals) else ""
