"""Checks of the samples that `tests/distributed/kept_samples.py` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.contracts.rollout import Role
from megatron_rl.models.families import read_shape
from megatron_rl.records.samples.reader import read_samples
from megatron_rl.records.samples.sample import Sample
from tests.support.batches import make_batch
from tests.support.policies import COLUMN_ADDITION

# By precision: the largest and the mean difference of values between layouts, in nats
TOLERANCES = {"float32": (2e-4, 2e-5), "bfloat16": (1.0, 0.1)}
METRICS = {
    "policy/entropy": lambda s: s.tokens.entropies,
    "mismatch/logprob_abs_mean": lambda s: np.abs(s.tokens.mismatches),
    "policy/ratio_mean": lambda s: s.tokens.ratios,
    "policy/clip_fraction_low": lambda s: s.tokens.clips[~np.isnan(s.tokens.ratios)] == -1,
    "policy/clip_fraction_high": lambda s: s.tokens.clips[~np.isnan(s.tokens.ratios)] == 1,
}


class Scenario:
    """The results that one scenario printed, and the samples that it wrote."""

    def __init__(self, directory: Path, result: dict[str, Any]) -> None:
        self.metrics: dict[str, float] = result["metrics"]
        self.plain_metrics: dict[str, float] = result["plain_metrics"]
        self.extremes: dict[str, str] = result["extremes"]
        self.samples = {s.rollout_id: s for s in read_samples(directory, 3)}


def check_samples(scenarios: Mapping[str, Scenario], name: str) -> None:
    """Compare the samples with rollouts, with metrics, and with samples of expert parallelism."""
    scenario = scenarios[name]
    _check_tokens(scenario.samples)
    _check_metrics(scenario)
    precision = name.rpartition("_")[2]
    _check_same_values(
        scenario.samples, scenarios[f"samples_{precision}"].samples, *TOLERANCES[precision]
    )


def _check_tokens(samples: dict[str, Sample]) -> None:
    """All tokens after the prompt come from the rollout, and values are at trained tokens."""
    rollouts = make_batch(read_shape(COLUMN_ADDITION), 9)[1]
    assert samples.keys() == {rollout.rollout_id for rollout in rollouts}
    for rollout in rollouts:
        sample = samples[rollout.rollout_id]
        segments = rollout.segments[1:]
        tokens = sample.tokens
        np.testing.assert_array_equal(tokens.ids, np.concatenate([s.tokens for s in segments]))
        logprobs = [
            np.full(len(s.tokens), np.nan) if s.logprobs is None else s.logprobs for s in segments
        ]
        np.testing.assert_array_equal(tokens.rollout_logprobs, np.concatenate(logprobs))
        is_tool = np.concatenate([np.full(len(s.tokens), s.role is Role.TOOL) for s in segments])
        for values in (tokens.logprobs, tokens.entropies, tokens.ratios, tokens.advantages):
            np.testing.assert_array_equal(np.isnan(values), is_tool)
        assert (tokens.advantages[~is_tool] == sample.training.advantage).all()


def _check_metrics(scenario: Scenario) -> None:
    """The means of the tokens of all samples are the metrics of the step."""
    assert scenario.metrics == scenario.plain_metrics
    for name, values in METRICS.items():
        parts = [values(sample) for sample in scenario.samples.values()]
        mean = np.nanmean(np.concatenate(parts).astype(np.float64))
        assert mean == pytest.approx(scenario.metrics[name], rel=1e-5), name
    by_mismatch = {name: s.tokens.mean_mismatch or 0.0 for name, s in scenario.samples.items()}
    by_clips = {name: s.tokens.clip_share or 0.0 for name, s in scenario.samples.items()}
    largest = {"highest-mismatch": by_mismatch, "most-clipped": by_clips}
    assert scenario.extremes.keys() == largest.keys()
    for kind, values_by_id in largest.items():
        name = scenario.extremes[kind]
        assert values_by_id[name] == pytest.approx(max(values_by_id.values()), rel=1e-6)


def _check_same_values(
    samples: dict[str, Sample], others: dict[str, Sample], largest: float, mean: float
) -> None:
    for name in ("logprobs", "entropies"):
        pairs = [
            (getattr(s.tokens, name), getattr(others[key].tokens, name))
            for key, s in samples.items()
        ]
        differences = np.concatenate([np.abs(value - other) for value, other in pairs])
        assert np.nanmax(differences) < largest and np.nanmean(differences) < mean, name
