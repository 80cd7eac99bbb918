"""The exchanges of one rank with others, in order, and where it waits for the result."""

from __future__ import annotations

import msgspec

SEND = "send"
RECEIVE = "recv_"
NEW_GROUP = "new_group"
WORLD = 0
# Megatron's name of the groups whose ranks hold different layers of the same replica
PIPELINE_GROUP = "PIPELINE_MODEL_PARALLEL_GROUP"
# Bytes that another collective announces: every rank knows the number when it runs.
ANNOUNCED = -1
NOT_ROOTED = -1
MESSAGES = (SEND, RECEIVE)


class Group(msgspec.Struct, frozen=True):
    """A process group. Every rank creates all groups of the job in the same order.

    name: Megatron's name for groups of this kind, empty for others. ranks: in the group's order.
    """

    name: str
    ranks: tuple[int, ...]


class Operation(msgspec.Struct, frozen=True):
    """A collective, or one end of a message.

    name: torch's name. group: its index in the order of creation; 0 is the group of all ranks.
    dtype, num_bytes: of the data that this rank contributes, or of each row where counts that the
    group gathered before decide the rows. `ANNOUNCED` bytes are not compared.
    root: the root's place in the group, or -1. peer: the other end of a message, as a place in the
    group, or in this rank's pipeline if `peer_in_pipeline`.
    batch: adjacent messages with the same number above 0 are one batch and progress together.
    place: the line of code.
    """

    name: str
    group: int
    dtype: str = ""
    num_bytes: int = 0
    root: int = NOT_ROOTED
    peer: int = NOT_ROOTED
    peer_in_pipeline: bool = False
    batch: int = 0
    place: str = ""

    @property
    def is_message(self) -> bool:
        return self.name in MESSAGES


class Phase(msgspec.Struct):
    """One rank's events in a part of a scenario.

    events: an index of `Trace.operations` is the start of that operation. -n is the wait for the
    n-th operation of the phase, counted from 1.
    """

    name: str
    events: list[int] = []


class Trace(msgspec.Struct):
    """The exchanges of one rank in a scenario.

    groups: in the order of their creation. mail: by phase, the bytes of the messages on the CPU
    that this rank sent.
    """

    rank: int
    world_size: int
    groups: list[Group]
    operations: list[Operation]
    phases: list[Phase]
    mail: dict[str, list[bytes]] = {}
