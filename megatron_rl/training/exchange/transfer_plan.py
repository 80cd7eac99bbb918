"""Plans which rank reads, sends and relays which rollouts. Every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from megatron_rl.contracts.step_plan import StepPlan


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as a receiver of rollouts.

    moe_rows: rows of its pipeline stage in the MoE-layer axis.
    """

    dp_rank: int
    node: int
    moe_rows: tuple[int, ...]


@dataclass
class TransferPlan:
    """Transfers of one rank, as indices of rollouts in the step plan.

    local: rollouts that this rank reads from the memory of its node.
    outgoing, incoming: by rank, rollouts that cross nodes.
    relay_outgoing, relay_incoming: by rank, rollouts that one rank of a node passes on to ranks of
    the same node that need the same (tensor parallelism).
    has_transfers, has_relays: True if any rank has some.
    """

    local: list[int]
    outgoing: list[list[int]]
    incoming: list[list[int]]
    relay_outgoing: list[list[int]]
    relay_incoming: list[list[int]]
    has_transfers: bool = False
    has_relays: bool = False

    @classmethod
    def for_rank(cls, plan: StepPlan, receivers: Sequence[Receiver], rank: int) -> TransferPlan:
        """Plan the transfers of one rank.

        Raises ValueError when a rollout is stored on a node where no rank runs.
        """
        count = len(receivers)
        result = cls(
            local=[],
            outgoing=_empty_lists(count),
            incoming=_empty_lists(count),
            relay_outgoing=_empty_lists(count),
            relay_incoming=_empty_lists(count),
        )
        for transfer in _all_transfers(plan, receivers):
            if transfer.sender is None:
                if transfer.receiver == rank:
                    result.local.append(transfer.rollout)
                continue
            result.has_transfers = True
            result.has_relays |= transfer.is_relay
            outgoing = result.relay_outgoing if transfer.is_relay else result.outgoing
            incoming = result.relay_incoming if transfer.is_relay else result.incoming
            if transfer.sender == rank:
                outgoing[transfer.receiver].append(transfer.rollout)
            if transfer.receiver == rank:
                incoming[transfer.sender].append(transfer.rollout)
        return result


class _Transfer(NamedTuple):
    """One rollout on its way to one rank.

    rollout: its index in the step plan.
    sender: None if the receiver reads the rollout from its own node's memory.
    is_relay: True if the sender has received it from another node.
    """

    rollout: int
    sender: int | None
    receiver: int
    is_relay: bool


def rollout_indices(plan: StepPlan, dp_rank: int) -> list[int]:
    """Return the indices of the rollouts that a data-parallel rank trains on, ascending."""
    return sorted(
        i for step in plan.optimizer_steps for batch in step.micro_batches[dp_rank] for i in batch
    )


def _all_transfers(plan: StepPlan, receivers: Sequence[Receiver]) -> Iterator[_Transfer]:
    ranks_by_node: dict[int, list[int]] = {}
    first_rank: dict[Receiver, int] = {}  # of the ranks of a node that need the same
    for rank, receiver in enumerate(receivers):
        ranks_by_node.setdefault(receiver.node, []).append(rank)
        first_rank.setdefault(receiver, rank)
    dp_ranks = {receiver.dp_rank for receiver in receivers}
    indices = {dp_rank: rollout_indices(plan, dp_rank) for dp_rank in dp_ranks}
    for rank, receiver in enumerate(receivers):
        first = first_rank[receiver]
        for index in indices[receiver.dp_rank]:
            node = plan.rollouts[index].location.node
            sender: int | None = first
            if node == receiver.node:
                sender = None
            elif first == rank:
                sender = _sender(index, node, ranks_by_node)
            yield _Transfer(index, sender, rank, is_relay=first != rank)


def _sender(index: int, node: int, ranks_by_node: dict[int, list[int]]) -> int:
    """Return the rank that sends a rollout to other nodes. The ranks of its node take turns."""
    if node not in ranks_by_node:
        raise ValueError(f"rollout {index} is stored on node {node}, where no rank runs")
    ranks = ranks_by_node[node]
    return ranks[index % len(ranks)]


def _empty_lists(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]
