"""Samples of a real training step on two ranks, for `worker_steps.py`.

The step trains twice from the same weights, with and without values for samples. Rank 0 writes the
samples of all rollouts. The rollouts are stored on two simulated nodes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_rl.contracts.commands import GatherSamples, SampleSource
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.records.samples.files import samples_file
from megatron_rl.records.samples.parts import SamplePart
from megatron_rl.records.samples.sample import SampleTraining
from megatron_rl.records.samples.writer import write_samples
from megatron_rl.run.features.samples.assembly import SampleContext, SampleTexts, assemble
from megatron_rl.run.features.samples.selection import Choice
from megatron_rl.training.worker import Worker
from tests.support.policies import COLUMN_ADDITION


def spread_over_nodes(refs: Sequence[RolloutRef]) -> list[RolloutRef]:
    """Place every other rollout on node 1, whose rank reads the same memory."""
    return [
        msgspec.structs.replace(ref, location=msgspec.structs.replace(ref.location, node=index % 2))
        for index, ref in enumerate(refs)
    ]


def train_with_samples(build: Callable[[], Worker], plan: StepPlan, out: Path) -> dict[str, Any]:
    """Train a step with and without values, and write the samples of all of its rollouts.

    build: makes a worker with the start weights.
    """
    plain = build()
    plain_outcome = plain.train(plan)
    worker = build()
    outcome = worker.train(plan, keep_values=True)
    weights = [p for model in worker.policy.models for p in model.parameters()]
    plain_weights = [p for model in plain.policy.models for p in model.parameters()]
    assert all(map(torch.equal, weights, plain_weights)), f"rank {worker.layout.rank}"
    sources = tuple(SampleSource(ref, index) for index, ref in enumerate(plan.rollouts))
    parts = worker.gather_samples(GatherSamples(sources))
    assert bool(parts) == (worker.layout.rank == 0)
    assert worker.gather_samples(GatherSamples(())) == []
    if parts:
        write(plan, parts, out)
    return {
        "metrics": outcome.metrics.values(),
        "plain_metrics": plain_outcome.metrics.values(),
        "extremes": {kind: plan.rollouts[i].rollout_id for kind, i in outcome.extremes.items()},
    }


def write(plan: StepPlan, parts: Sequence[SamplePart], out: Path) -> None:
    """Write the samples as rank 0 does. Every rollout has one part of each kind."""
    tokens = {part.index: part.tokens for part in parts if part.tokens is not None}
    values = {part.index: part.values for part in parts if part.values is not None}
    assert len(tokens) == len(values) == len(plan.rollouts) and len(parts) == 2 * len(tokens)
    texts = SampleTexts(Tokenizer.from_directory(COLUMN_ADDITION))
    samples = [
        assemble(_context(plan, index), tokens[index], values[index], texts) for index in tokens
    ]
    out.mkdir(parents=True, exist_ok=True)
    assert write_samples(samples_file(out, plan.step), samples, 2**20) == len(samples)


def _context(plan: StepPlan, index: int) -> SampleContext:
    ref = plan.rollouts[index]
    return SampleContext(
        step=plan.step,
        choice=Choice(group=index, rollout=ref),
        prompt=Prompt(id=ref.prompt_id, token_ids=(), answer="", task="t"),
        training=SampleTraining(
            group_kind="mixed", is_trained=True, advantage=plan.advantages[index], weight=1.0
        ),
    )
