"""Gaps between engine, old and current policy, measured on one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import OptimizerSettings, ParallelSettings

GRID = ParallelSettings(timeout_s=60)


def measure(checkpoint: Path, layout: Any, *, lr: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """The gaps, and the log-probabilities before the update."""
    from megatron_rl.mcore.optimizer import DistributedAdam
    from tests.lab.policy_gaps import evaluate, measure_gaps
    from tests.support.batches import make_batch
    from tests.support.policies import make_batcher, make_planner, make_policy

    shape, policy = make_policy(checkpoint, GRID, GrpoSettings())
    refs, rollouts, advantages = make_batch(shape, 9)
    planner = make_planner(GRID, layout, optimizer_steps_per_batch=2, tokens_per_micro_batch=64)
    plan = planner.plan(1, refs, advantages)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    by_index = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    batcher = make_batcher(shape, GRID, layout)
    batches = [batch for step in batcher.optimizer_steps(plan, 0, by_index) for batch in step]
    before = {
        "live": evaluate(policy, batches, "live"),
        "replay": evaluate(policy, batches, "replay"),
        "engine": torch.cat([batch.rollout_logprobs for batch in batches]),
    }
    settings = OptimizerSettings(lr=lr, warmup_steps=0, decay="constant")
    adam = DistributedAdam(policy.models, settings, total_steps=2)
    worker: Any = SimpleNamespace(policy=policy, optimizer=adam, batcher=batcher)
    return measure_gaps(worker, plan, by_index), before


@pytest.mark.parametrize(
    ("tokens", "count_above"), [(1, 0), (500, 0), (1000, 1), (1999, 1), (2000, 2), (51_234, 51)]
)
def test_the_tail_is_the_value_that_999_of_1000_do_not_exceed(
    megatron: Any, tokens: int, count_above: int
) -> None:
    from megatron_rl.training.replay.log_histogram import RESOLUTION, log_counts, quantile
    from tests.lab.policy_gaps import Gap

    sizes = torch.linspace(1.0, 2.0, tokens, dtype=torch.float64)
    zeros = torch.zeros(tokens, dtype=torch.float64)
    tail = Gap.between(-sizes[torch.randperm(tokens)], zeros).tail
    assert int((sizes > tail).sum()) == count_above
    histogram_tail = quantile(log_counts(sizes), 0.999)
    assert histogram_tail == pytest.approx(tail, rel=RESOLUTION), "as in mismatch/*"


def test_extreme_tokens_differ_by_more_than_a_factor_of_two(megatron: Any) -> None:
    from tests.lab.policy_gaps import Gap

    ratios = torch.tensor([1.0, 1.99, 2.01, 0.51, 0.49, 1.5, 7.0, 1.0], dtype=torch.float64)
    assert Gap.between(ratios.log(), torch.zeros(8, dtype=torch.float64)).extreme == 3 / 8


@pytest.mark.slow
def test_engine_and_old_policy_are_compared_before_the_update(
    megatron: Any, checkpoint: Path
) -> None:
    gaps, before = measure(checkpoint, megatron, lr=1e-2)
    live = float((before["live"] - before["engine"]).abs().mean())
    replay = float((before["replay"] - before["engine"]).abs().mean())
    assert gaps.tokens == len(before["engine"]) and 0 < gaps.disagreement < 1
    means = {name: gap.mean for name, gap in gaps.engine_old.items()}
    assert means == pytest.approx({"off": live, "trainer": live, "rollout": replay})
    assert live != pytest.approx(replay, rel=1e-5)
    for gap in gaps.old_current.values():
        assert gap.mean > 0 and gap.tail > gap.mean and gap.k3 > 0
    assert len({gap.mean for gap in gaps.old_current.values()}) == 3
    assert msgspec.json.decode(msgspec.json.encode(gaps), type=type(gaps)) == gaps


@pytest.mark.slow
def test_old_and_current_policy_are_equal_without_an_update(
    megatron: Any, checkpoint: Path
) -> None:
    gaps, _ = measure(checkpoint, megatron, lr=0.0)
    sizes = {name: (gap.mean, gap.tail) for name, gap in gaps.old_current.items()}
    assert sizes == dict.fromkeys(("off", "trainer", "rollout"), (0.0, 0.0))
