"""Compute Megatron's log-probabilities of recorded rollouts under torchrun, and save them.

The rollouts are packed and their routes replayed.

Usage: megatron_logprobs.py CASE... A case is
LAYOUT:CHECKPOINT:ROLLOUTS:TOKENS_PER_MICRO_BATCH:OUT, with a layout of `tests.support.layouts`.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.losses import LossResult, Objective, ResponseTokens
from megatron_rl.mcore import parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.rollouts.wire.codec import select_layers
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.old_policy import compute_old_policy
from tests.support.layouts import LAYOUTS
from tests.support.policies import make_batcher, make_planner, make_policy, make_view
from tests.support.recordings import read_rollouts
from tests.support.rollout_refs import make_ref


class Recorder:
    """A loss that records the responses it is prepared with."""

    def __init__(self) -> None:
        self.responses: list[ResponseTokens] = []

    def prepare(self, response: ResponseTokens) -> Objective:
        self.responses.append(response)

        def objective(logprobs: torch.Tensor, denominators: object) -> LossResult:
            raise AssertionError("nothing is trained here")

        return objective


def run_case(case: str, settings: ParallelSettings, layout: RankLayout) -> None:
    _, checkpoint, rollouts_file, tokens, out = case.split(":")
    shape, policy = make_policy(Path(checkpoint), settings, GrpoSettings(), **layout.groups)
    recorder = Recorder()
    policy = dataclasses.replace(policy, loss=recorder)
    rollouts = read_rollouts(Path(rollouts_file))
    planner = make_planner(settings, layout, tokens_per_micro_batch=int(tokens))
    plan = planner.plan(0, [make_ref(rollout) for rollout in rollouts], [1.0] * len(rollouts))
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    layer_rows = make_view(shape, settings, layout).moe_rows(shape.moe_layers)
    routes = {
        i: select_layers(by_id[ref.rollout_id], layer_rows) for i, ref in enumerate(plan.rollouts)
    }
    batcher = make_batcher(shape, settings, layout)
    (batches,) = batcher.optimizer_steps(plan, layout.dp_rank, routes)
    metrics = MetricSums()
    compute_old_policy(policy, batches, metrics)
    is_last_stage = layout.pp_rank == settings.pp - 1
    save_logprobs(old_logprobs(plan, layout, recorder, is_last_stage), layout, out)
    if layout.rank == 0:
        print(metrics.values(), flush=True)


def old_logprobs(
    plan: StepPlan, layout: RankLayout, recorder: Recorder, is_last_stage: bool
) -> dict[str, torch.Tensor]:
    """This rank's log-probabilities, by rollout; empty before the last pipeline stage."""
    logprobs = {}
    micro_batches = plan.optimizer_steps[0].micro_batches[layout.dp_rank]
    for indices, response in zip(micro_batches, recorder.responses, strict=is_last_stage):
        bounds = response.cu_seqlens.tolist()
        for i, start, stop in zip(indices, bounds, bounds[1:], strict=False):
            logprobs[plan.rollouts[i].rollout_id] = response.old_logprobs[start:stop].clone()
    return logprobs


def save_logprobs(logprobs: dict[str, torch.Tensor], layout: RankLayout, out: str) -> None:
    """Gather all ranks' log-probabilities; rank 0 writes them."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.world_size)]
    dist.all_gather_object(parts, logprobs)
    if layout.rank == 0:
        torch.save({name: value for part in parts for name, value in part.items()}, out)


def main() -> None:
    for name, cases in itertools.groupby(sys.argv[1:], lambda case: case.partition(":")[0]):
        settings = LAYOUTS[name].parallel
        layout = parallel.initialize(settings, seed=0)
        for case in cases:
            run_case(case, settings, layout)
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


if __name__ == "__main__":
    main()
