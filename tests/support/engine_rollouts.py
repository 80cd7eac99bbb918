"""Rollouts from real engines, generated as a run generates them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import Command
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.engines.engines import open_engines
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.models.families import read_shape
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.wire.store import read_rollout
from tests.support.selectors import FixedPrompts

# One rank needs no groups.
_NO_GROUP: Any = None


class _OnlyRank(RankLayout):
    """A rank that has joined no job. Its store is its own."""

    def store(self) -> dist.Store:
        return dist.HashStore()


ONLY_RANK = _OnlyRank(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    num_nodes=1,
    dp_rank=0,
    dp_size=1,
    tp_rank=0,
    pp_rank=0,
    cp_rank=0,
    ep_rank=0,
    device=torch.device("cpu"),
    control_group=_NO_GROUP,
    tp_group=None,
    cp_group=None,
)


def sample_rollouts(
    configuration: Configuration, prompts: Sequence[Prompt], directory: Path
) -> list[Rollout]:
    """Generate and score one batch as a run does, with engines, collector and queue.

    The engines load the checkpoint's weights. As none are sent, the configuration needs
    `engine.extra_args=[--weight-version=0]`.
    """
    shape = read_shape(configuration.model.path)
    (directory / "logs").mkdir(parents=True)
    with open_engines(configuration, shape, ONLY_RANK, RunDirectory(directory)) as engines:
        connections = engines.connect(sends_weights=False)
        assert connections is not None
        connections.fleet.admit_without_weights()
        sampler = RolloutSampler(
            connections.queue,
            configuration.rollout,
            FixedPrompts(prompts, configuration.rollout.samples_per_prompt),
            shape.eos_token_ids,
            partial(connections.recover, _refuse_command),
        )
        return [read_rollout(ref) for group in sampler.sample(1).groups for ref in group.rollouts]


def _refuse_command(command: Command) -> None:
    """Fail: engines that hold their weights already need no command."""
    raise AssertionError(f"unexpected command {command}")
