"""Messages between the nodes of one engine: where its servers meet, and which have ended.

They talk through the key-value store of all ranks.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from megatron_rl.contracts.wire_types import Count
from megatron_rl.engines.node.node_board import NodeBoard


class StartState(StrEnum):
    """The state of one start of an engine over several nodes.

    STARTING: every node starts its server. RUNNING: the engine answers. ENDED: every node ends its
    server.
    """

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """The last start of an engine over several nodes, which its first node announces.

    number: counts the starts from 1. address: the host and port where its servers meet.
    """

    number: Count
    address: str
    state: StartState = StartState.STARTING


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A further node's message about its server.

    number: of the start. reason: why the server has ended, empty while it runs. log_tail: the last
    lines of its log. is_leaving: the run ends on that node.
    """

    number: Count
    reason: str = ""
    log_tail: str = ""
    is_leaving: bool = False


_start_decoder = msgspec.msgpack.Decoder(EngineStart)
_report_decoder = msgspec.msgpack.Decoder(ServerReport)


class Meeting:
    """The talk about one engine. Calls raise `NodeBoardLost`.

    first_node: the node that leads. index: the engine's number there. num_servers: of the engine,
    one on each node from the first one on.
    """

    def __init__(self, board: NodeBoard, *, first_node: int, index: int, num_servers: int) -> None:
        self.first_node = first_node
        self.num_servers = num_servers
        self._board = board
        self._key = f"engines/{first_node}-{index}"

    def announce(self, start: EngineStart) -> None:
        """Replace what the first node says."""
        self._board.write(f"{self._key}/start", msgspec.msgpack.encode(start))

    def read_start(self) -> EngineStart | None:
        """Return what the first node says, None before it has said anything."""
        data = self._board.read(f"{self._key}/start")
        return None if data is None else _start_decoder.decode(data)

    def report(self, rank: int, report: ServerReport) -> None:
        """Replace what a further node says. rank: its server's number, from 1."""
        self._board.write(f"{self._key}/server-{rank}", msgspec.msgpack.encode(report))

    def read_reports(self) -> dict[int, ServerReport]:
        """Return what the further nodes say, by the numbers of their servers."""
        reports = {}
        for rank in range(1, self.num_servers):
            data = self._board.read(f"{self._key}/server-{rank}")
            if data is not None:
                reports[rank] = _report_decoder.decode(data)
        return reports
