"""Script for torchrun: three ranks on two simulated nodes exchange rollouts over gloo.

In a second exchange one of the rollouts cannot be read.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from megatron_rl.contracts.exit_codes import Failure

sys.path.insert(0, str(Path(__file__).parent))

from test_exchange import plan_of, read, rollout_of

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.wire import codec
from megatron_rl.training.exchange.rollout_exchange import exchange_rollouts
from megatron_rl.training.exchange.transfer_plan import Receiver, rollout_indices
from tests.support.rollouts import assert_equal


def unreadable(ref: RolloutRef) -> Rollout:
    if ref.rollout_id == "r3":
        raise OSError("gone")
    return read(ref)


def main() -> None:
    """Exchange rollouts on this rank.

    The group is a local variable: a process that ends while a module still holds one can be
    aborted, because the group's threads release tensors after the interpreter has ended.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    plan = plan_of([i // 3 % 2 for i in range(17)], dp_size=2)
    # The last two ranks are tensor-parallel
    receivers = [Receiver(dp_rank=node, node=node, moe_rows=(2, 0)) for node in (0, 1, 1)]
    rollouts = exchange_rollouts(plan, receivers, rank, group, read)
    assert sorted(rollouts) == rollout_indices(plan, receivers[rank].dp_rank)
    for index, rollout in rollouts.items():
        assert_equal(rollout, codec.select_layers(rollout_of(index), (2, 0)))
    try:
        exchange_rollouts(plan, receivers, rank, group, unreadable)
    except Failure as error:
        assert "rollout r3: gone" in str(error)
    else:
        raise AssertionError(f"rank {rank} raised nothing")
    dist.barrier()
    if rank == 0:
        print(f"exchanged on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
