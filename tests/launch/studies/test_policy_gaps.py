"""What the table of gaps compares, on one rank."""

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


def measured(checkpoint: Path, layout: Any, *, lr: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """The gaps, and what the old policy gives live and replayed."""
    from launch.studies.policy_gaps import evaluate, measure_gaps
    from launch.testbed.batches import make_batch
    from launch.testbed.policies import make_batcher, make_planner, make_policy
    from megatron_rl.mcore.optimizer import DistributedAdam

    shape, policy = make_policy(checkpoint, GRID, GrpoSettings())
    refs, rollouts, advantages = make_batch(shape, 9)
    plan = make_planner(GRID, layout, optimizer_steps_per_batch=2, tokens_per_micro_batch=64).plan(
        1, refs, advantages
    )
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    mine = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    batcher = make_batcher(shape, GRID, layout)
    flat = [batch for step in batcher.optimizer_steps(plan, 0, mine) for batch in step]
    before = {"live": evaluate(policy, flat, "live"), "replayed": evaluate(policy, flat, "replay")}
    before["sampled"] = torch.cat([batch.rollout_logprobs for batch in flat])
    adam = DistributedAdam(
        policy.models, OptimizerSettings(lr=lr, warmup_steps=0, decay="constant"), total_steps=2
    )
    worker: Any = SimpleNamespace(policy=policy, optimizer=adam, batcher=batcher)
    return measure_gaps(worker, plan, mine), before


@pytest.mark.parametrize(
    ("tokens", "exceeding"), [(1, 0), (500, 0), (1000, 1), (1999, 1), (2000, 2), (51_234, 51)]
)
def test_the_tail_is_what_999_of_1000_do_not_exceed(
    megatron: Any, tokens: int, exceeding: int
) -> None:
    from launch.studies.policy_gaps import Gap
    from megatron_rl.training.replay.log_histogram import RESOLUTION, log_counts, quantile

    size = torch.linspace(1.0, 2.0, tokens, dtype=torch.float64)
    found = Gap.between(
        -size[torch.randperm(tokens)], torch.zeros(tokens, dtype=torch.float64)
    ).tail
    assert int((size > found).sum()) == exceeding
    assert quantile(log_counts(size), 0.999) == pytest.approx(found, rel=RESOLUTION), (
        "as in mismatch/*"
    )


def test_a_token_is_extreme_when_its_probabilities_differ_by_more_than_a_factor_of_two(
    megatron: Any,
) -> None:
    from launch.studies.policy_gaps import Gap

    ratios = torch.tensor([1.0, 1.99, 2.01, 0.51, 0.49, 1.5, 7.0, 1.0], dtype=torch.float64)
    assert Gap.between(ratios.log(), torch.zeros(8, dtype=torch.float64)).extreme == 3 / 8


def test_engine_to_old_is_before_the_update_with_live_and_with_recorded_routes(
    megatron: Any, checkpoint: Path
) -> None:
    gaps, before = measured(checkpoint, megatron, lr=1e-2)
    live, replayed = (
        float((before[name] - before["sampled"]).abs().mean()) for name in ("live", "replayed")
    )
    assert gaps.tokens == len(before["sampled"]) and 0 < gaps.disagreement < 1
    means = {name: gap.mean for name, gap in gaps.engine_old.items()}
    assert means == pytest.approx({"off": live, "trainer": live, "rollout": replayed})
    assert live != pytest.approx(replayed, rel=1e-5)
    assert all(
        gap.mean > 0 and gap.tail > gap.mean and gap.k3 > 0 for gap in gaps.old_current.values()
    )
    assert len({gap.mean for gap in gaps.old_current.values()}) == 3
    assert msgspec.json.decode(msgspec.json.encode(gaps), type=type(gaps)) == gaps


def test_without_a_change_of_weights_old_and_current_are_equal(
    megatron: Any, checkpoint: Path
) -> None:
    gaps, _ = measured(checkpoint, megatron, lr=0.0)
    assert {name: (gap.mean, gap.tail) for name, gap in gaps.old_current.items()} == dict.fromkeys(
        ("off", "trainer", "rollout"), (0.0, 0.0)
    )
