"""Encoded rollouts move once, to the ranks that train on them, each with its pipeline stage's
routes only.

A rank on the collector's node reads shared memory itself. What crosses nodes goes through one
all-to-all on the CPU to one of the ranks of a node that need the same, which hands it on to the
others of its node by a second one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.rollouts import codec
from megatron_rl.training.collectives import gather_bytes
from megatron_rl.training.transfer_plan import Receiver, TransferPlan

_MOST_NAMED = 4


class ExchangeFailed(Failure):
    """Some rank could not read its rollouts; every rank says so, and none waits for it."""

    exit_code = ExitCode.ENGINE_FAILED


def exchange_rollouts(
    plan: StepPlan,
    receivers: Sequence[Receiver],
    rank: int,
    group: dist.ProcessGroup,
    read: Callable[[RolloutRef], Rollout],
) -> dict[int, Rollout]:
    """Collective over `group`: this rank's rollouts by index in the plan. Raises `ExchangeFailed`
    on all ranks.
    """
    desk = _ExchangeBuffer(plan, receivers[rank].moe_rows)
    parcels = TransferPlan.of(plan, receivers, rank)
    for index in parcels.own:
        desk.keep(index, lambda ref: codec.select_layers(read(ref), desk.moe_rows))
    arrived: dict[int, memoryview] = {}
    if parcels.crosses:
        sent = [
            desk.encode(indices, receivers[to].moe_rows, read)
            for to, indices in enumerate(parcels.outgoing)
        ]
        arrived |= _swap(sent, parcels.incoming, group)
    if parcels.hands_on:
        again = [[arrived[index] for index in indices] for indices in parcels.handed_on]
        arrived |= _swap(again, parcels.handed_over, group)
    for index, data in arrived.items():
        if data:  # whoever could not read it reports that
            desk.keep(index, partial(_decode, data))
    _agree(plan.step, desk.problems, group)
    return desk.rollouts


class _ExchangeBuffer:
    """Where a rank's rollouts gather; whatever is wrong with one is noted, so that all ranks can be
    told.
    """

    def __init__(self, plan: StepPlan, moe_rows: tuple[int, ...]) -> None:
        self._plan = plan
        self.moe_rows = moe_rows
        self.rollouts: dict[int, Rollout] = {}
        self.problems: list[str] = []

    def keep(self, index: int, get: Callable[[RolloutRef], Rollout]) -> None:
        ref = self._plan.rollouts[index]
        try:
            rollout = get(ref)
            _check(rollout, ref, len(self.moe_rows))
        except (
            Exception
        ) as error:  # whatever it is: a rank that raises alone leaves the others waiting
            self.problems.append(f"rollout {ref.rollout_id}: {error}")
        else:
            self.rollouts[index] = rollout

    def encode(
        self,
        indices: Iterable[int],
        moe_rows: tuple[int, ...],
        read: Callable[[RolloutRef], Rollout],
    ) -> list[bytes]:
        """Rollouts for another rank; nothing in the place of one that cannot be read."""
        encoded = []
        for index in indices:
            ref = self._plan.rollouts[index]
            try:
                encoded.append(codec.encode(codec.select_layers(read(ref), moe_rows)))
            except Exception as error:
                self.problems.append(f"rollout {ref.rollout_id}: {error}")
                encoded.append(b"")
        return encoded


def _decode(data: memoryview, ref: RolloutRef) -> Rollout:
    return codec.decode(data)


def _check(rollout: Rollout, ref: RolloutRef, num_moe_rows: int) -> None:
    """Raise ValueError where a rollout is not what was planned with."""
    trainable = sum(len(segment.tokens) for segment in rollout.segments if segment.trainable)
    if (rollout.num_tokens - 1, trainable) != (ref.num_inputs, ref.num_trainable):
        raise ValueError(
            f"{rollout.num_tokens} tokens, {trainable} of them trained, where {ref.num_inputs + 1} and "
            f"{ref.num_trainable} were planned with"
        )
    if rollout.routes is not None and rollout.routes.shape[:2] != (ref.num_inputs, num_moe_rows):
        raise ValueError(
            f"routes of shape {rollout.routes.shape} for {ref.num_inputs} inputs, {num_moe_rows} layers"
        )


def _swap(
    outgoing: Sequence[Sequence[bytes | memoryview]],
    incoming: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
) -> dict[int, memoryview]:
    """One all-to-all: what arrived, by index in the plan. incoming: the indices that each rank
    sends here, in order.
    """
    received = _all_to_all([msgspec.msgpack.encode(parts) for parts in outgoing], group)
    arrived: dict[int, memoryview] = {}
    for data, indices in zip(received, incoming, strict=True):
        parts = msgspec.msgpack.decode(data, type=list[memoryview])
        arrived.update(zip(indices, parts, strict=True))
    return arrived


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


def _agree(step: int, problems: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise `ExchangeFailed` on every rank when there is a problem on one."""
    everyone = gather_bytes(msgspec.msgpack.encode(problems), group)
    named = [
        f"rank {rank}: {problem}"
        for rank, data in enumerate(everyone)
        for problem in msgspec.msgpack.decode(data, type=list[str])
    ]
    if named:
        more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        raise ExchangeFailed(
            f"step {step}: rollouts cannot be trained on: {'; '.join(named[:_MOST_NAMED])}{more}"
        )
