"""Exchange of encoded rollouts: each moves once, to the ranks that train on it.

A rank gets the routes of its pipeline stage only. If the rollout is stored on the rank's node, the
rank reads shared memory itself. Rollouts cross nodes in one all-to-all on the CPU, to one of the
ranks of a node that need the same. A second all-to-all relays them to the others of the node.
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
from megatron_rl.mcore.collectives import gather_bytes
from megatron_rl.rollouts.wire import codec
from megatron_rl.rollouts.wire.store import RolloutGone
from megatron_rl.training.exchange.transfer_plan import Receiver, TransferPlan

_MAX_PROBLEMS_IN_MESSAGE = 4


class RolloutsLost(Failure):
    """Rollouts are gone with their collector. They can be sampled again.

    rollout_ids: rollouts that some rank could not read.
    """

    def __init__(self, message: str, rollout_ids: Sequence[str]) -> None:
        super().__init__(message, ExitCode.ENGINE_FAILED)
        self.rollout_ids = tuple(rollout_ids)


class _Problem(msgspec.Struct, frozen=True):
    """The reason why a rank cannot train on a rollout. is_lost: it is gone with its collector."""

    rollout_id: str
    text: str
    is_lost: bool


def exchange_rollouts(
    plan: StepPlan,
    receivers: Sequence[Receiver],
    rank: int,
    group: dist.ProcessGroup,
    read: Callable[[RolloutRef], Rollout],
    *,
    keep: Callable[[RolloutRef], None] | None = None,
    kept_refs: Iterable[RolloutRef] = (),
) -> dict[int, Rollout]:
    """Return this rank's rollouts by index in the plan. Collective over `group`.

    receivers: all ranks in order.
    read: reads a rollout that is stored on this node. keep: keeps one readable. It is called first,
    with `kept_refs`: rollouts that this rank reads later too.
    Raises `Failure` on all ranks, and `RolloutsLost` where that is the only problem.
    """
    buffer = _ExchangeBuffer(plan, receivers[rank].moe_rows)
    transfers = TransferPlan.for_rank(plan, receivers, rank)
    buffer.keep(kept_refs, keep)
    for index in transfers.local:
        buffer.add(index, lambda ref: codec.select_layers(read(ref), buffer.moe_rows))
    outgoing = [
        buffer.encode(indices, receivers[receiver].moe_rows, read)
        for receiver, indices in enumerate(transfers.outgoing)
    ]
    for index, data in _transfer(transfers, outgoing, group).items():
        if data:  # empty if the sender could not read it, which the sender reports
            buffer.add(index, partial(_decode, data))
    _raise_problems(plan.step, buffer.problems, group)
    return buffer.rollouts


def _transfer(
    transfers: TransferPlan, outgoing: Sequence[Sequence[bytes]], group: dist.ProcessGroup
) -> dict[int, memoryview]:
    """Exchange rollouts with other nodes; returns the received parts by index in the plan."""
    parts: dict[int, memoryview] = {}
    if transfers.has_transfers:
        parts |= _swap(outgoing, transfers.incoming, group)
    if transfers.has_relays:
        relays = [[parts[index] for index in indices] for indices in transfers.relay_outgoing]
        parts |= _swap(relays, transfers.relay_incoming, group)
    return parts


class _ExchangeBuffer:
    """Collects a rank's rollouts, and the problems with them for the message on all ranks."""

    def __init__(self, plan: StepPlan, moe_rows: tuple[int, ...]) -> None:
        self._plan = plan
        self.moe_rows = moe_rows
        self.rollouts: dict[int, Rollout] = {}
        self.problems: list[_Problem] = []

    def add(self, index: int, get: Callable[[RolloutRef], Rollout]) -> None:
        """Get a rollout, check it and add it."""
        ref = self._plan.rollouts[index]
        try:
            rollout = get(ref)
            _check(rollout, ref, len(self.moe_rows))
        # Any exception: a rank that raises alone would leave the others waiting
        except Exception as error:
            self.problems.append(_problem(ref, error))
        else:
            self.rollouts[index] = rollout

    def keep(self, refs: Iterable[RolloutRef], keep: Callable[[RolloutRef], None] | None) -> None:
        """Keep rollouts readable."""
        if keep is None:
            return
        for ref in refs:
            try:
                keep(ref)
            except Exception as error:  # as in `add`
                self.problems.append(_problem(ref, error))

    def encode(
        self,
        indices: Iterable[int],
        moe_rows: tuple[int, ...],
        read: Callable[[RolloutRef], Rollout],
    ) -> list[bytes]:
        """Encode rollouts for another rank. A rollout that cannot be read becomes empty."""
        parts = []
        for index in indices:
            ref = self._plan.rollouts[index]
            try:
                parts.append(codec.encode(codec.select_layers(read(ref), moe_rows)))
            except Exception as error:
                self.problems.append(_problem(ref, error))
                parts.append(b"")
        return parts


def _problem(ref: RolloutRef, error: Exception) -> _Problem:
    return _Problem(ref.rollout_id, str(error), isinstance(error, RolloutGone))


def _decode(data: memoryview, ref: RolloutRef) -> Rollout:
    return codec.decode(data)


def _check(rollout: Rollout, ref: RolloutRef, num_moe_rows: int) -> None:
    """Raise ValueError if a rollout differs from the one in the plan."""
    num_trainable = sum(len(segment.tokens) for segment in rollout.segments if segment.trainable)
    if (rollout.num_tokens - 1, num_trainable) != (ref.num_inputs, ref.num_trainable):
        raise ValueError(
            f"it has {rollout.num_tokens} tokens, {num_trainable} of them trained, but the plan "
            f"has {ref.num_inputs + 1} and {ref.num_trainable}"
        )
    if rollout.routes is not None and rollout.routes.shape[:2] != (ref.num_inputs, num_moe_rows):
        raise ValueError(
            f"it has routes of shape {rollout.routes.shape} for {ref.num_inputs} inputs and "
            f"{num_moe_rows} layers"
        )


def _swap(
    outgoing: Sequence[Sequence[bytes | memoryview]],
    incoming: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
) -> dict[int, memoryview]:
    """Run one all-to-all and return the received parts by index in the plan.

    outgoing: the parts for each rank.
    incoming: the indices that each rank sends here, in order.
    """
    messages = _all_to_all([msgspec.msgpack.encode(parts) for parts in outgoing], group)
    received_parts: dict[int, memoryview] = {}
    for data, indices in zip(messages, incoming, strict=True):
        parts = msgspec.msgpack.decode(data, type=list[memoryview])
        received_parts.update(zip(indices, parts, strict=True))
    return received_parts


def _all_to_all(outgoing: Sequence[bytes], group: dist.ProcessGroup) -> list[memoryview]:
    """Send one message to each rank and return the messages of each rank."""
    send_sizes = torch.tensor([len(data) for data in outgoing])
    receive_sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(receive_sizes, send_sizes, group=group)
    send_buffer = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8)
    receive_buffer = torch.empty(int(receive_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        receive_buffer, send_buffer, receive_sizes.tolist(), send_sizes.tolist(), group=group
    )
    view = memoryview(receive_buffer.numpy().data)
    offsets = [0, *receive_sizes.cumsum(0).tolist()]
    return [view[start:stop] for start, stop in itertools.pairwise(offsets)]


def _raise_problems(step: int, problems: Sequence[_Problem], group: dist.ProcessGroup) -> None:
    """Raise `Failure` on every rank if any rank has a problem (a collective): none may wait."""
    problems_of_ranks = [
        msgspec.msgpack.decode(data, type=list[_Problem])
        for data in gather_bytes(msgspec.msgpack.encode(problems), group)
    ]
    texts = [
        f"rank {rank}: rollout {problem.rollout_id}: {problem.text}"
        for rank, rank_problems in enumerate(problems_of_ranks)
        for problem in rank_problems
    ]
    if texts:
        num_more = len(texts) - _MAX_PROBLEMS_IN_MESSAGE
        more = f"; and {num_more} more" if num_more > 0 else ""
        first = "; ".join(texts[:_MAX_PROBLEMS_IN_MESSAGE])
        message = f"step {step}: rollouts cannot be trained on: {first}{more}"
        all_problems = [problem for part in problems_of_ranks for problem in part]
        if all(problem.is_lost for problem in all_problems):
            raise RolloutsLost(message, [problem.rollout_id for problem in all_problems])
        raise Failure(message, ExitCode.ENGINE_FAILED)
