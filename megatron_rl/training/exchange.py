"""Payloads move once, to the ranks that train on them."""

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
    """One rank as a receiver of payloads: its data-parallel rank, its node, the MoE rows of its pipeline stage."""

    dp_rank: int
    node: int
    moe_rows: tuple[int, ...]


def samples_of(plan: StepPlan, dp_rank: int) -> list[int]:
    """Indices of the samples a data-parallel rank trains on, ascending."""
    return sorted(i for step in plan.optimizer_steps for batch in step.micro_batches[dp_rank] for i in batch)


def sender_of(index: int, location_node: int, receiver: int, consumers: Sequence[Receiver]) -> int:
    """The rank that hands sample `index` to `receiver`: itself on the same node, else one of the payload's node."""
    if consumers[receiver].node == location_node:
        return receiver
    local = [rank for rank, consumer in enumerate(consumers) if consumer.node == location_node]
    if not local:
        raise ValueError(f"sample {index} lies on node {location_node}, where no rank runs")
    return local[index % len(local)]


def exchange_rollouts(
    plan: StepPlan,
    consumers: Sequence[Receiver],
    rank: int,
    group: dist.ProcessGroup,
    read: Callable[[RolloutRef], Rollout],
) -> dict[int, Rollout]:
    """Collective over `group`: this rank's rollouts by sample index."""
    own: dict[int, Rollout] = {}
    outgoing: list[list[bytes]] = [[] for _ in consumers]
    incoming: list[list[int]] = [[] for _ in consumers]
    for receiver, consumer in enumerate(consumers):
        for index in samples_of(plan, consumer.dp_rank):
            sample = plan.samples[index]
            sender = sender_of(index, sample.location.node, receiver, consumers)
            if sender == rank:
                rollout = codec.select_layers(read(sample), consumer.moe_rows)
                if receiver == rank:
                    own[index] = rollout
                else:
                    outgoing[receiver].append(codec.encode(rollout))
            elif receiver == rank:
                incoming[sender].append(index)
    received = _all_to_all([b"".join(_with_length(part) for part in parts) for parts in outgoing], group)
    for sender, indices in enumerate(incoming):
        for index, data in zip(indices, _split(received[sender]), strict=True):
            own[index] = codec.decode(data)
    return own


def _all_to_all(outgoing: Sequence[bytes], group: dist.ProcessGroup) -> list[memoryview]:
    send_sizes = torch.tensor([len(data) for data in outgoing])
    receive_sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(receive_sizes, send_sizes, group=group)
    send = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)[: int(send_sizes.sum())]
    receive = torch.empty(int(receive_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(receive, send, receive_sizes.tolist(), send_sizes.tolist(), group=group)
    view = memoryview(receive.numpy().data)
    offsets = [0, *receive_sizes.cumsum(0).tolist()]
    return [view[start:stop] for start, stop in itertools.pairwise(offsets)]


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _split(data: memoryview) -> list[memoryview]:
    parts, position = [], 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        parts.append(data[position + 8 : position + 8 + length])
        position += 8 + length
    return parts
