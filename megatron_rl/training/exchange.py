"""Encoded rollouts move once, to the ranks that train on them, each with its pipeline stage's routes only.

A rank on the collector's node reads shared memory itself; what crosses nodes goes through one all-to-all on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.plan import StepPlan
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts import codec


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as a receiver of rollouts: its data-parallel rank, its node, the MoE rows of its pipeline stage."""

    dp_rank: int
    node: int
    moe_rows: tuple[int, ...]


def rollouts_of(plan: StepPlan, dp_rank: int) -> list[int]:
    """Indices of the rollouts a data-parallel rank trains on, ascending."""
    return sorted(i for step in plan.optimizer_steps for batch in step.micro_batches[dp_rank] for i in batch)


def sender_of(index: int, location_node: int, receiver: int, receivers: Sequence[Receiver]) -> int:
    """The rank that hands rollout `index` to `receiver`: itself on the same node, else one of the rollout's node."""
    if receivers[receiver].node == location_node:
        return receiver
    local = [rank for rank, candidate in enumerate(receivers) if candidate.node == location_node]
    if not local:
        raise ValueError(f"rollout {index} lies on node {location_node}, where no rank runs")
    return local[index % len(local)]


def exchange_rollouts(
    plan: StepPlan,
    receivers: Sequence[Receiver],
    rank: int,
    group: dist.ProcessGroup,
    read: Callable[[RolloutRef], Rollout],
) -> dict[int, Rollout]:
    """Collective over `group`: this rank's rollouts by index in the plan."""
    own: dict[int, Rollout] = {}
    outgoing: list[list[bytes]] = [[] for _ in receivers]
    incoming: list[list[int]] = [[] for _ in receivers]
    for to, receiver in enumerate(receivers):
        for index in rollouts_of(plan, receiver.dp_rank):
            ref = plan.rollouts[index]
            sender = sender_of(index, ref.location.node, to, receivers)
            if sender == rank:
                rollout = codec.select_layers(read(ref), receiver.moe_rows)
                if to == rank:
                    own[index] = rollout
                else:
                    outgoing[to].append(codec.encode(rollout))
            elif to == rank:
                incoming[sender].append(index)
    received = _all_to_all([msgspec.msgpack.encode(parts) for parts in outgoing], group)
    for sender, indices in enumerate(incoming):
        for index, data in zip(indices, msgspec.msgpack.decode(received[sender], type=list[memoryview]), strict=True):
            own[index] = codec.decode(data)
    return own


def _all_to_all(outgoing: Sequence[bytes], group: dist.ProcessGroup) -> list[memoryview]:
    send_sizes = torch.tensor([len(data) for data in outgoing])
    receive_sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(receive_sizes, send_sizes, group=group)
    send = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8)
    receive = torch.empty(int(receive_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(receive, send, receive_sizes.tolist(), send_sizes.tolist(), group=group)
    view = memoryview(receive.numpy().data)
    offsets = [0, *receive_sizes.cumsum(0).tolist()]
    return [view[start:stop] for start, stop in itertools.pairwise(offsets)]
