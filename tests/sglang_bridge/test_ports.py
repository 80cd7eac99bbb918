"""Ports that are free, and addresses that are private."""

import socket

import pytest

from sglang_bridge.ports import choose_port, is_free, require_private_address


def test_a_port_in_use_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        other = choose_port("127.0.0.1", port)
        assert other != port
        assert is_free("127.0.0.1", other)


def test_a_free_preferred_port_is_kept() -> None:
    port = choose_port("127.0.0.1")
    assert choose_port("127.0.0.1", port) == port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.7", "::1"])
def test_private_addresses_pass(host: str) -> None:
    require_private_address(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "::"])
def test_other_addresses_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="not a loopback or private address"):
        require_private_address(host)


def test_a_host_without_address_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be resolved"):
        require_private_address("no-such-host.invalid")
