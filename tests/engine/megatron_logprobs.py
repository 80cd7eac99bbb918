"""Under torchrun: Megatron's log-probabilities of recorded rollouts, packed, routes replayed; rank 0 saves them.

Usage: megatron_logprobs.py EP CASE...; a case is CHECKPOINT:ROLLOUTS:TOKENS_PER_MICRO_BATCH:OUT.
"""

import dataclasses
import sys
from pathlib import Path

from megatron_rl.mcore.cpu import compat

compat.install()

import torch
import torch.distributed as dist

from megatron_rl.config.schema import GrpoSettings, ParallelSettings
from megatron_rl.losses import LossResult, Objective, ResponseTokens
from megatron_rl.mcore import parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.records.metric_sums import MetricSums
from megatron_rl.rollouts.files import read_rollouts
from megatron_rl.training.old_policy import compute_old_policy
from support.policies import make_batcher, make_planner, make_policy
from support.rollouts import make_ref


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
    checkpoint, rollouts_file, tokens, out = case.split(":")
    shape, policy = make_policy(Path(checkpoint), settings, GrpoSettings())
    recorder = Recorder()
    policy = dataclasses.replace(policy, loss=recorder)
    rollouts = read_rollouts(Path(rollouts_file))
    planner = make_planner(settings, layout, tokens_per_micro_batch=int(tokens))
    plan = planner.plan(0, [make_ref(rollout) for rollout in rollouts], [1.0] * len(rollouts))
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    own = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    (batches,) = make_batcher(shape, settings, layout).optimizer_steps(plan, layout.dp_rank, own)
    metrics = MetricSums()
    compute_old_policy(policy, batches, metrics)
    mine = {}
    for indices, response in zip(plan.optimizer_steps[0].micro_batches[layout.dp_rank], recorder.seen, strict=True):
        bounds = response.cu_seqlens.tolist()
        for i, start, stop in zip(indices, bounds, bounds[1:], strict=False):
            mine[plan.rollouts[i].rollout_id] = response.old_logprobs[start:stop].clone()
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.world_size)]
    dist.all_gather_object(everyone, mine)
    if layout.rank == 0:
        torch.save({name: value for part in everyone for name, value in part.items()}, out)
        print(metrics.values(), flush=True)


def main() -> None:
    ep, *cases = sys.argv[1:]
    settings = ParallelSettings(ep=int(ep), timeout_s=120)
    layout = parallel.initialize(settings, seed=0)
    for case in cases:
        one_case(case, settings, layout)
    parallel.shutdown()


if __name__ == "__main__":
    main()
