"""Which of this machine's addresses another machine reaches it under."""

from __future__ import annotations

import os
import socket

LOOPBACK = "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # a datagram socket only picks the route
        return str(probe.getsockname()[0])


def node_address(num_nodes: int) -> str:
    """Where this node's engines and, on rank 0, the hub listen: loopback, or the address towards torchrun's master."""
    if num_nodes == 1:
        return LOOPBACK
    return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
