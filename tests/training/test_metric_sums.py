"""Weighted means and maxima of metrics."""

import torch

from megatron_rl.training.metric_sums import MetricSums


def test_means_do_not_depend_on_the_split() -> None:
    whole = MetricSums()
    left = MetricSums()
    right = MetricSums()
    whole.add({"loss": torch.tensor([1.0 + 2.0 + 6.0, 3.0])}, {"top": torch.tensor(6.0)})
    left.add({"loss": torch.tensor([1.0, 1.0])}, {"top": torch.tensor(1.0)})
    right.add({"loss": torch.tensor([8.0, 2.0])}, {"top": torch.tensor(6.0)})
    sums = left.merge([MetricSums.from_bytes(right.to_bytes())])
    assert sums.values() == whole.values() == {"loss": 3.0, "top": 6.0}


def test_a_metric_without_weight_is_absent() -> None:
    metrics = MetricSums()
    metrics.add_mean("clip", 0.0, 0.0)
    assert metrics.values() == {}
