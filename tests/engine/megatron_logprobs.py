"""Under torchrun: Megatron's log-probabilities of recorded rollouts, packed, routes replayed; rank
0 saves them.

Usage: megatron_logprobs.py CASE...; a case is
LAYOUT:CHECKPOINT:ROLLOUTS:TOKENS_PER_MICRO_BATCH:OUT, the layout one of `support.layouts`.
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

from launch.testbed.policies import make_batcher, make_planner, make_policy, make_view
from launch.testbed.rollout_refs import make_ref
from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.losses import LossResult, Objective, ResponseTokens
from megatron_rl.mcore import parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.rollouts.codec import select_layers
from megatron_rl.rollouts.files import read_rollouts
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.old_policy import compute_old_policy
from tests.support.layouts import LAYOUTS


class Recorder:
    """A loss that keeps what it is prepared with."""

    def __init__(self) -> None:
        self.seen: list[ResponseTokens] = []

    def prepare(self, response: ResponseTokens) -> Objective:
        self.seen.append(response)

        def objective(logprobs: torch.Tensor, denominators: object) -> LossResult:
            raise AssertionError("nothing is trained here")

        return objective


def one_case(case: str, settings: ParallelSettings, layout: RankLayout) -> None:
    _, checkpoint, rollouts_file, tokens, out = case.split(":")
    shape, policy = make_policy(Path(checkpoint), settings, GrpoSettings(), **layout.groups)
    recorder = Recorder()
    policy = dataclasses.replace(policy, loss=recorder)
    rollouts = read_rollouts(Path(rollouts_file))
    planner = make_planner(settings, layout, tokens_per_micro_batch=int(tokens))
    plan = planner.plan(0, [make_ref(rollout) for rollout in rollouts], [1.0] * len(rollouts))
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    held = make_view(shape, settings, layout).moe_rows(shape.moe_layers)
    own = {i: select_layers(by_id[ref.rollout_id], held) for i, ref in enumerate(plan.rollouts)}
    (batches,) = make_batcher(shape, settings, layout).optimizer_steps(plan, layout.dp_rank, own)
    metrics = MetricSums()
    compute_old_policy(policy, batches, metrics)
    mine = {}
    planned = plan.optimizer_steps[0].micro_batches[layout.dp_rank]
    for indices, response in zip(planned, recorder.seen, strict=layout.pp_rank == settings.pp - 1):
        bounds = response.cu_seqlens.tolist()
        for i, start, stop in zip(indices, bounds, bounds[1:], strict=False):
            mine[plan.rollouts[i].rollout_id] = response.old_logprobs[start:stop].clone()
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.world_size)]
    dist.all_gather_object(everyone, mine)
    if layout.rank == 0:
        torch.save({name: value for part in everyone for name, value in part.items()}, out)
        print(metrics.values(), flush=True)


def main() -> None:
    for name, cases in itertools.groupby(sys.argv[1:], lambda case: case.partition(":")[0]):
        settings = LAYOUTS[name].parallel
        layout = parallel.initialize(settings, seed=0)
        for case in cases:
            one_case(case, settings, layout)
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


if __name__ == "__main__":
    main()
