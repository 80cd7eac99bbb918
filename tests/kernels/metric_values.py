"""Metrics of the loss, added up and divided as the logging code does."""

from __future__ import annotations

from dataclasses import fields

import torch

from espo_kernels import EspoMetrics


def add_metrics(*parts: EspoMetrics) -> EspoMetrics:
    """Add up the metrics of all parts."""
    stacks = {
        f.name: torch.stack([getattr(part, f.name) for part in parts]) for f in fields(EspoMetrics)
    }
    extremes = {
        "ratio_min": stacks.pop("ratio_min").amin(0),
        "ratio_max": stacks.pop("ratio_max").amax(0),
    }
    return EspoMetrics(**{name: values.sum(0) for name, values in stacks.items()}, **extremes)


def metric_values(metrics: EspoMetrics) -> dict[str, torch.Tensor]:
    """Every mean, `ess` (in (0, 1]), `ratio_min`, `ratio_max`. 0/0 is NaN."""
    values = {name: pair[0] / pair[1] for name, pair in metrics.means().items()}
    for name in [name for name in values if name.startswith("ratio_mean")]:
        square = values[name.replace("ratio_mean", "ratio_square_mean")]
        values[name.replace("ratio_mean", "ess")] = values[name] ** 2 / square
    return {**values, "ratio_min": metrics.ratio_min.min(), "ratio_max": metrics.ratio_max.max()}
