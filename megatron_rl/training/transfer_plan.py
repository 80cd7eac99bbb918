"""Which rank reads, sends, receives and hands on which rollouts: arithmetic that every rank does
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from megatron_rl.contracts.step_plan import StepPlan


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as a receiver of rollouts: its data-parallel rank, its node, the MoE rows of its
    pipeline stage.
    """

    dp_rank: int
    node: int
    moe_rows: tuple[int, ...]


@dataclass
class TransferPlan:
    """Indices of rollouts in the plan, as one rank sees them.

    own: read here, from this node's memory. outgoing, incoming: by rank, across nodes. handed_on,
    handed_over: by rank, to and from ranks of this node that need the same (tensor parallelism).
    crosses, hands_on: whether any rank sends anything across nodes, and hands anything on.
    """

    own: list[int]
    outgoing: list[list[int]]
    incoming: list[list[int]]
    handed_on: list[list[int]]
    handed_over: list[list[int]]
    crosses: bool
    hands_on: bool

    @classmethod
    def of(cls, plan: StepPlan, receivers: Sequence[Receiver], rank: int) -> TransferPlan:
        """Raises ValueError when a rollout lies on a node where no rank runs."""
        ranks_of: dict[int, list[int]] = {}
        first_of: dict[Receiver, int] = {}
        for other, receiver in enumerate(receivers):
            ranks_of.setdefault(receiver.node, []).append(other)
            first_of.setdefault(receiver, other)
        wanted = {
            dp_rank: rollouts_of(plan, dp_rank)
            for dp_rank in {receiver.dp_rank for receiver in receivers}
        }
        nodes = [ref.location.node for ref in plan.rollouts]
        lists: list[list[list[int]]] = [[[] for _ in receivers] for _ in range(4)]
        found = cls([], lists[0], lists[1], lists[2], lists[3], crosses=False, hands_on=False)
        for to, receiver in enumerate(receivers):
            first = first_of[receiver]
            there, here = (
                (found.outgoing, found.incoming)
                if first == to
                else (found.handed_on, found.handed_over)
            )
            for index in wanted[receiver.dp_rank]:
                if nodes[index] == receiver.node:
                    if to == rank:
                        found.own.append(index)
                    continue
                sender = _sender(index, nodes[index], ranks_of) if first == to else first
                if sender == rank:
                    there[to].append(index)
                if to == rank:
                    here[sender].append(index)
                found.crosses, found.hands_on = True, found.hands_on or first != to
        return found


def rollouts_of(plan: StepPlan, dp_rank: int) -> list[int]:
    """Indices of the rollouts a data-parallel rank trains on, ascending."""
    return sorted(
        i for step in plan.optimizer_steps for batch in step.micro_batches[dp_rank] for i in batch
    )


def _sender(index: int, node: int, ranks_of: dict[int, list[int]]) -> int:
    """The rank that sends a rollout to other nodes: those of its node take turns."""
    if node not in ranks_of:
        raise ValueError(f"rollout {index} lies on node {node}, where no rank runs")
    return ranks_of[node][index % len(ranks_of[node])]
