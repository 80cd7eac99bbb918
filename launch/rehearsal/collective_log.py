"""Records the collectives of one rank, and answers them as if all ranks held equal values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work
from torch.utils._python_dispatch import _disable_current_modes

from launch.rehearsal.code_places import calling_place
from launch.rehearsal.known_values import KnownValues, tensors_in
from launch.rehearsal.order.recorder import Recorder

_POINT_TO_POINT = ("send", "recv_")
# The part of its own bytes that a rank sends over its link, for groups of n ranks: f(n).
_ALL_REDUCE_FACTOR = 2.0


@dataclass(frozen=True)
class Collective:
    """One collective, or one message between two ranks.

    name: torch's name. ranks: the group, in order; sender or receiver alone for messages.
    dtype, num_bytes: of what this rank passes in, or of what it receives if that is larger.
    phase: the part of the step.
    """

    name: str
    ranks: tuple[int, ...]
    dtype: str
    num_bytes: int
    phase: str

    @property
    def link_bytes(self) -> float:
        """The bytes that a ring sends over the link of one rank."""
        size = len(self.ranks)
        if self.name in _POINT_TO_POINT:
            return float(self.num_bytes)
        share = (size - 1) / size
        return self.num_bytes * share * (_ALL_REDUCE_FACTOR if "allreduce" in self.name else 1.0)


@dataclass
class CollectiveLog:
    """The collectives of one rank, in order.

    message_shape: the shape of the hidden states that pipeline stages exchange. It answers the
    messages in which Megatron announces a shape.
    recorder: also records the order, with the waits.
    """

    values: KnownValues
    phase: str = ""
    message_shape: tuple[int, ...] = ()
    entries: list[Collective] = field(default_factory=list)
    recorder: Recorder | None = None

    def run(self, func: Any, args: Sequence[Any]) -> Any:
        """Record a collective, write known results, and return what torch expects."""
        name = func._schema.name.partition("::")[2]
        tensors = tensors_in(args)
        self._record(name, args, tensors)
        self._answer(name, args)
        fake_work = FakeWork()
        if self.recorder is not None:
            group = _group_of(args)
            fake_work = self.recorder.start(func, args, group, tensors, calling_place())
        work = Work.boxed(fake_work)
        returns = func._schema.returns
        return work if len(returns) == 1 else (args[0], work)

    def _record(self, name: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        group = _group_of(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        if name in _POINT_TO_POINT:
            peer = int(args[2])
            ranks = (ranks[peer],)
        sizes = [leaf.numel() * leaf.element_size() for leaf in tensors]
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self.entries.append(Collective(name, ranks, dtype, max(sizes, default=0), self.phase))

    def _answer(self, name: str, args: Sequence[Any]) -> None:
        """Write the values that ranks with equal values would exchange."""
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            output = args[0]
            source = args[1]
            value = self.values.get(source)
            if value is not None:
                with _disable_current_modes():
                    copies = -(-output.numel() // max(1, value.numel()))
                    value = value.reshape(-1).repeat(copies)[: output.numel()]
            self.values.overwrite(output, value)
        elif name == "allgather_":
            for outputs, source in zip(args[0], args[1], strict=True):
                for output in outputs:
                    self.values.overwrite(output, self.values.get(source))
        elif name == "recv_":
            for tensor in args[0]:
                self.values.overwrite(tensor, self._message(tensor))
        elif name == "broadcast_" and self.recorder is not None:
            self.recorder.receive(args[0][0], root=int(args[2]))
        elif name not in ("allreduce_", "broadcast_", "barrier", "send", "monitored_barrier_"):
            for tensor in tensors_in(args[0]):
                self.values.overwrite(tensor, None)

    def _message(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.recorder is not None and tensor.device.type == "cpu":
            return self.recorder.take_mail(tensor.dtype)
        if tensor.dtype != torch.int64 or tensor.numel() != len(self.message_shape):
            return None
        with _disable_current_modes():
            return torch.tensor(self.message_shape)


def _group_of(args: Sequence[Any]) -> Any:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = ProcessGroup.unbox(argument)
            except RuntimeError:  # an operation such as a sum is a script object too
                continue
            return dist.distributed_c10d._resolve_process_group(group.group_name)
    raise ValueError("a collective without a group")
