"""Records the operations of one rank, and answers what they would receive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import _disable_current_modes

from launch.rehearsal.order.trace import (
    ANNOUNCED,
    MESSAGES,
    NEW_GROUP,
    NOT_ROOTED,
    PIPELINE_GROUP,
    SEND,
    WORLD,
    Group,
    Operation,
    Phase,
    Trace,
)

_PEER_ARGUMENTS = ("dst", "src")
_SPLIT_BY_COUNTS = ("alltoall_base_", "alltoall_")


class Recorder:
    """Records the operations of this process.

    Attributes:
    inbox: what this rank receives in broadcasts on the CPU, in order.
    mail: by phase, what it receives in messages on the CPU, in order.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.trace = Trace(rank, world_size, [Group("WORLD", tuple(range(world_size)))], [], [])
        self.inbox: list[torch.Tensor] = []
        self.mail: dict[str, list[bytes]] = {}
        self._indices: dict[Operation, int] = {}
        self._group_of_name: dict[str, int] = {}
        self._works: dict[int, tuple[FakeWork, int, int]] = {}
        self._num_starts = 0
        self._batch = 0
        self._num_batches = 0
        self.begin("setup")

    def begin(self, phase: str) -> None:
        """Begin a part of the scenario."""
        self.trace.phases.append(Phase(phase))
        self._num_starts = 0

    def start(
        self,
        func: Any,
        args: Sequence[Any],
        group: dist.ProcessGroup,
        tensors: Sequence[torch.Tensor],
        place: str,
    ) -> FakeWork:
        """Record the start of an operation of torch. Returns what the caller may wait for."""
        name = func._schema.name.partition("::")[2]
        values = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        }
        peer, in_pipeline = self._peer(name, values, group)
        if name == SEND and tensors[0].device.type == "cpu":
            messages = self.trace.mail.setdefault(self.trace.phases[-1].name, [])
            messages.append(_to_bytes(tensors[0]))
        operation = Operation(
            name=name,
            group=self._group_index(group),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            num_bytes=_comparable_bytes(name, tensors),
            root=int(values.get("root_rank", NOT_ROOTED)),
            peer=peer,
            peer_in_pipeline=in_pipeline,
            batch=self._batch if name in MESSAGES else 0,
            place=place,
        )
        return self._append(operation)

    def start_objects(
        self, name: str, group: dist.ProcessGroup | None, place: str, root: int = NOT_ROOTED
    ) -> None:
        """Record a collective of Python objects, whose bytes another collective announces."""
        index = WORLD if group is None else self._group_index(group)
        self.wait(self._append(Operation(name, index, "", ANNOUNCED, root, place=place)))

    def add_group(self, ranks: Sequence[int], name: str, group: Any, place: str) -> None:
        """Record the creation of a group, which all ranks of the job must enter.

        group: torch's group, or its constant for ranks outside of it.
        """
        index = len(self.trace.groups)
        self.trace.groups.append(Group(name, tuple(ranks)))
        if isinstance(group, dist.ProcessGroup):
            self._group_of_name[group.group_name] = index
        # The index stands for the members: groups are compared apart
        self.wait(self._append(Operation(NEW_GROUP, WORLD, root=index, place=place)))

    def wait(self, work: Any) -> None:
        """Record that the rank waits for the end of an operation."""
        _, phase, number = self._works.pop(id(work), (None, -1, 0))
        if phase == len(self.trace.phases) - 1:
            self.trace.phases[-1].events.append(-number)

    def receive(self, tensor: torch.Tensor, root: int) -> None:
        """Write what the root of a broadcast on the CPU would send, if this rank is another."""
        if tensor.device.type == "cpu" and root != self.trace.rank and self.inbox:
            with _disable_current_modes():
                tensor.copy_(self.inbox.pop(0))

    def take_mail(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The next message on the CPU, None if it is not known."""
        messages = self.mail.get(self.trace.phases[-1].name)
        if not messages:
            return None
        data = messages.pop(0)
        with _disable_current_modes():
            return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)

    def begin_batch(self) -> None:
        """Let the messages that follow progress together."""
        self._num_batches += 1
        self._batch = 1 + self._num_batches % 2

    def end_batch(self) -> None:
        """End the batch of messages."""
        self._batch = 0

    def _append(self, operation: Operation) -> FakeWork:
        index = self._indices.setdefault(operation, len(self.trace.operations))
        if index == len(self.trace.operations):
            self.trace.operations.append(operation)
        self._num_starts += 1
        self.trace.phases[-1].events.append(index)
        work = FakeWork()
        # The reference keeps the address, by which `wait` knows the operation
        self._works[id(work)] = (work, len(self.trace.phases) - 1, self._num_starts)
        return work

    def _group_index(self, group: dist.ProcessGroup) -> int:
        if group is dist.group.WORLD:
            return WORLD
        return self._group_of_name[group.group_name]

    def _peer(
        self, name: str, values: dict[str, Any], group: dist.ProcessGroup
    ) -> tuple[int, bool]:
        """The other end of a message, and whether it is a place in the pipeline."""
        if name not in MESSAGES:
            return NOT_ROOTED, False
        peer = next(int(values[key]) for key in _PEER_ARGUMENTS if key in values)
        ranks = dist.get_process_group_ranks(group)
        pipeline = self._pipeline()
        if len(ranks) == self.trace.world_size and ranks[peer] in pipeline:
            return pipeline.index(ranks[peer]), True
        return peer, False

    def _pipeline(self) -> tuple[int, ...]:
        for group in self.trace.groups:
            if group.name == PIPELINE_GROUP and self.trace.rank in group.ranks:
                return group.ranks
        return ()


def _to_bytes(tensor: torch.Tensor) -> bytes:
    with _disable_current_modes():
        data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _comparable_bytes(name: str, tensors: Sequence[torch.Tensor]) -> int:
    """The bytes that all ranks of a group must agree on."""
    if not tensors:
        return 0
    first = tensors[0]
    if first.dtype is torch.uint8 and first.device.type == "cpu":
        return ANNOUNCED
    if name in _SPLIT_BY_COUNTS:
        return first.element_size() * math.prod(first.shape[1:])
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(sizes) if "coalesced" in name else max(sizes)


def install(recorder: Recorder) -> None:
    """Let torch tell a recorder of batches of messages and of waits, in this process."""
    batch_messages = dist.batch_isend_irecv
    library: Any = dist

    def record_batch(messages: list[Any]) -> Any:
        recorder.begin_batch()
        try:
            return batch_messages(messages)
        finally:
            recorder.end_batch()

    def record_wait(self: FakeWork, *_: Any, **__: Any) -> bool:
        recorder.wait(self)
        return True

    library.batch_isend_irecv = library.distributed_c10d.batch_isend_irecv = record_batch
    FakeWork.wait = record_wait  # type: ignore[method-assign]
