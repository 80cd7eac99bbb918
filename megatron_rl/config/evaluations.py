"""The names and metrics by which a run chooses its best checkpoint."""

from __future__ import annotations

from megatron_rl.config.schema import EvalSettings

# The name of the held-out questions, beside the names in eval.sets
HELD_OUT = "held_out"
_METRICS = ("accuracy", "reward", "parseable", "finished")


def best_metric(keep_best: str) -> str:
    """Return the metric that `run.keep_best` names. A set stands for its accuracy."""
    if "/" in keep_best:
        return keep_best
    return "eval/accuracy" if keep_best == HELD_OUT else f"eval/{keep_best}/accuracy"


def is_best_metric(metric: str, settings: EvalSettings) -> bool:
    """True for a metric that evaluations during training report, and that should be high."""
    if metric in [f"eval/{name}" for name in _METRICS]:
        return True
    for name in settings.sets:
        samples = settings.of_set(name).samples_per_prompt
        passes = [f"pass@{1 << power}" for power in range(samples.bit_length())]
        if metric in [f"eval/{name}/{end}" for end in (*_METRICS, *passes)]:
            return True
    return False
