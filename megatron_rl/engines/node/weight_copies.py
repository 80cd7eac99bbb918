"""Copies of the weights on the nodes with engines, which rank 0 lets follow its pushes.

Rank 0 orders and the nodes answer through the key-value store of all ranks. The weights themselves
travel through the shared file system.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_rl.contracts.wire_types import Count
from megatron_rl.engines.node.node_board import NodeBoard, NodeBoardLost
from megatron_rl.records.reminder import Reminder
from sglang_bridge.deltas.codec import BrokenDelta
from sglang_bridge.deltas.transport import CopyReply
from sglang_bridge.deltas.weight_copy import WeightCopy

_POLL_SECONDS = 0.02
_JOIN_SECONDS = 5.0
_ORDER = "copies/order"


class CopyOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to rebuild the weights of a push.

    number: counts the orders from 1. nodes: nodes that it is for.
    """

    number: Count
    push: str
    nodes: tuple[Count, ...]


class CopyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A node's answer to the order of the same number. path, reason: see `CopyReply`."""

    number: Count
    path: str = ""
    reason: str = ""


class WeightCopyKeeper:
    """Lets the copy of this node follow the orders of rank 0. Its thread begins at once.

    board: on a connection of its own.
    """

    def __init__(self, node: int, copy: WeightCopy, board: NodeBoard) -> None:
        self._node = node
        self._copy = copy
        self._board = board
        self._last_number = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="weight copy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. It is not awaited for more than five seconds."""
        self._end.set()
        self._thread.join(_JOIN_SECONDS)

    def _keep(self) -> None:
        while not self._end.wait(_POLL_SECONDS):
            try:
                data = self._board.read(_ORDER)
                if data is not None:
                    self._follow(msgspec.msgpack.decode(data, type=CopyOrder))
            except NodeBoardLost:
                return  # the node's keeper of processes reports it

    def _follow(self, order: CopyOrder) -> None:
        if order.number <= self._last_number:
            return
        self._last_number = order.number
        if self._node not in order.nodes:
            return
        try:
            answer = CopyAnswer(number=order.number, path=str(self._copy.take(Path(order.push))))
        except BrokenDelta as error:
            answer = CopyAnswer(number=order.number, reason=str(error))
        except Exception as error:  # rank 0 must hear of it: it waits for an answer
            answer = CopyAnswer(number=order.number, reason=f"{type(error).__name__}: {error}")
        self._board.write(_answer_key(self._node), msgspec.msgpack.encode(answer))


class RemoteWeightCopies:
    """The copies on all nodes, as rank 0 orders them.

    nodes: nodes that hold a copy. timeout_seconds: of an answer. log: writes
    a line for people about long waits.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        board: NodeBoard,
        *,
        timeout_seconds: float,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nodes = nodes
        self._board = board
        self._timeout = timeout_seconds
        self._log = log
        self._clock = clock
        self._last_number = 0

    def take(self, push: Path, nodes: Sequence[int]) -> Mapping[int, CopyReply]:
        """Let nodes rebuild the weights of a push, and wait for an answer of each."""
        self._last_number += 1
        order = CopyOrder(number=self._last_number, push=str(push), nodes=tuple(nodes))
        self._board.write(_ORDER, msgspec.msgpack.encode(order))
        deadline = self._clock() + self._timeout
        reminder = Reminder()
        replies: dict[int, CopyReply] = {}
        while len(replies) < len(nodes) and self._clock() < deadline:
            silent_nodes = [node for node in nodes if node not in replies]
            replies |= self._read_answers(silent_nodes)
            if len(replies) < len(nodes):
                if reminder.is_due():
                    seconds = round(reminder.seconds)
                    self._log(
                        f"waiting for nodes {silent_nodes} to rebuild the weights, {seconds} s"
                    )
                time.sleep(_POLL_SECONDS)
        silence = CopyReply(
            reason=f"its node did not rebuild the weights within sync.timeout_s={self._timeout:g}"
        )
        return {node: replies.get(node, silence) for node in nodes}

    def _read_answers(self, nodes: Sequence[int]) -> dict[int, CopyReply]:
        replies = {}
        for node in nodes:
            data = self._board.read(_answer_key(node))
            if data is None:
                continue
            answer = msgspec.msgpack.decode(data, type=CopyAnswer)
            if answer.number == self._last_number:
                replies[node] = CopyReply(path=answer.path, reason=answer.reason)
        return replies


def _answer_key(node: int) -> str:
    return f"copies/answers/{node}"
