"""Free ports for servers."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range, so that no outgoing connection takes a chosen port before the
# server binds it.
_FIRST_PORT = 20000
_LAST_PORT = 32000
_ATTEMPTS = 64


def is_free(host: str, port: int) -> bool:
    """True if a server could bind the port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Servers set SO_REUSEADDR: a port in TIME_WAIT counts as free, one that listens does not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def choose_port(host: str, preference: int | None = None) -> int:
    """Choose the preferred port if it is free, else a random free one.

    Another process may still take it first. Raises `OSError` if no free port is found.
    """
    if preference is not None and is_free(host, preference):
        return preference
    generator = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = generator.randrange(_FIRST_PORT, _LAST_PORT)
        if is_free(host, port):
            return port
    raise OSError(
        f"no free port found on {host} in {_FIRST_PORT}-{_LAST_PORT} after {_ATTEMPTS} attempts"
    )
