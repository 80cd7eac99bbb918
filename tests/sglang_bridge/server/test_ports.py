"""Ports that are free."""

import socket

from sglang_bridge.server.ports import choose_port, is_free


def test_port_in_use_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        other = choose_port("127.0.0.1", port)
        assert other != port
        assert is_free("127.0.0.1", other)


def test_free_preferred_port_is_chosen() -> None:
    port = choose_port("127.0.0.1")
    assert choose_port("127.0.0.1", port) == port
