"""Creates Megatron's process groups over the ranks of a job."""

from __future__ import annotations

import datetime
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.job import Job, join, leave


@dataclass(frozen=True)
class RankLayout(Job):
    """The place of this rank in the parallel grid.

    dp_rank, dp_size: the place in the dense data-parallel group, across which experts are sharded.
    tp_rank, pp_rank, cp_rank, ep_rank: the places in the tensor-, pipeline-, context- and
        expert-parallel groups.
    tp_group: the ranks that share the vocabulary; None without tensor parallelism.
    cp_group: the ranks that share sequences; None without context parallelism.
    """

    dp_rank: int
    dp_size: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks that decide which layers and rows this rank needs, as keyword arguments."""
        return {"pp_rank": self.pp_rank, "cp_rank": self.cp_rank, "tp_rank": self.tp_rank}

    @property
    def groups(self) -> dict[str, dist.ProcessGroup | None]:
        """The groups that compute log-probabilities together, as keyword arguments.

        Their ranks share the vocabulary or the sequences.
        """
        return {"tp_group": self.tp_group, "cp_group": self.cp_group}


def initialize(parallel: ParallelSettings, *, seed: int, job: Job | None = None) -> RankLayout:
    """Create Megatron's process groups and set every random seed. Collective over all ranks.

    job: the job that this process has joined; None joins it first.
    """
    job = join(parallel) if job is None else job
    _create_groups(parallel)
    _seed_everything(seed)
    return RankLayout(
        **vars(job),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group() if parallel.tp > 1 else None,
        cp_group=parallel_state.get_context_parallel_group() if parallel.cp > 1 else None,
    )


def _create_groups(parallel: ParallelSettings) -> None:
    chunks = parallel.vpp or 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        # Declared as whole minutes, and used as `timedelta(minutes=...)`
        distributed_timeout_minutes=parallel.timeout_s / 60,
    )
    # Megatron creates this group, which gathers the state of experts for checkpoints, with torch's
    # default of half an hour
    distributed_c10d._set_pg_timeout(
        datetime.timedelta(seconds=parallel.timeout_s),
        parallel_state.get_expert_data_parallel_group_gloo(),
    )


def expert_tensor_size(parallel: ParallelSettings) -> int:
    """Return the number of ranks that share one expert."""
    return parallel.etp or parallel.default_etp


def shutdown() -> None:
    """Destroy Megatron's groups and leave the job. Does nothing if this process never joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        leave()


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
