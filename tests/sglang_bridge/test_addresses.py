"""Addresses that are private, and URLs that can be an engine's."""

import pytest

from sglang_bridge import addresses
from sglang_bridge.addresses import (
    node_address,
    repeated_url_refusals,
    require_private_address,
    url_refusal,
)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "10.1.2.3",
        "172.31.0.1",
        "192.168.0.7",
        "::1",
        "fd00::1",
        "::ffff:10.1.2.3",
        "100.64.0.1",
        "100.127.255.254",
        "198.19.0.1",
    ],
)
def test_private_addresses_pass(host: str) -> None:
    require_private_address(host)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "8.8.8.8",
        "::",
        "::ffff:8.8.8.8",
        "::ffff:169.254.169.254",
        "2606:4700::1111",
        "169.254.169.254",
        "100.63.255.255",
        "100.128.0.1",
        "172.32.0.1",
        "224.0.0.1",
        "239.1.2.3",
    ],
)
def test_other_addresses_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="not a loopback or private address"):
        require_private_address(host)


def test_a_host_without_address_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be resolved"):
        require_private_address("no-such-host.invalid")


def test_one_node_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert node_address(1) == node_address(2) == "127.0.0.1"


@pytest.mark.parametrize(
    ("master", "address"),
    [("head-node", "10.1.2.3"), ("127.0.0.1", "127.0.1.1"), ("localhost", "127.0.1.1")],
)
def test_a_master_whose_name_is_loopback_gives_others_its_own_address(
    master: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(
        addresses,
        "address_towards",
        lambda host, port: "10.1.2.3" if host == "192.0.2.1" else "127.0.1.1",
    )
    assert node_address(2) == address


def test_a_master_without_a_route_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def address_towards(host: str, port: int) -> str:
        if host == "192.0.2.1":
            raise OSError(101, "Network is unreachable")
        return "127.0.1.1"

    monkeypatch.setenv("MASTER_ADDR", "head-node")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(addresses, "address_towards", address_towards)
    assert node_address(2) == "127.0.1.1"


def test_engine_url_passes() -> None:
    assert url_refusal("http://127.0.0.1:30000") is None
    assert url_refusal("http://localhost:30000/") is None
    assert url_refusal("http://100.64.12.7:30000") is None


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://[::1", "not a URL"),
        ("http://127.0.0.1:port", "not a URL"),
        ("https://127.0.0.1:1", "plain HTTP"),
        ("127.0.0.1:30000", "a scheme, a host and a port"),
        ("http://127.0.0.1", "a scheme, a host and a port"),
        ("http://:30000", "a scheme, a host and a port"),
        ("http://me@127.0.0.1:1", "no user, path, query or fragment"),
        ("http://127.0.0.1:1/v1", "no user, path, query or fragment"),
        ("http://127.0.0.1:1?a=b", "no user, path, query or fragment"),
        ("http://127.0.0.1:0", "a port from 1"),
        ("http://[::1]:30000", "IPv4"),
        ("http://8.8.8.8:30000", "not a loopback or private address"),
    ],
)
def test_invalid_engine_urls_are_refused(url: str, rule: str) -> None:
    refusal = url_refusal(url)
    assert refusal is not None
    assert (refusal.key, refusal.value) == ("engine.urls", url)
    assert rule in refusal.rule and refusal.remedy
    assert str(refusal).startswith(f"engine.urls={url}: ")


def test_one_server_under_two_names_is_refused() -> None:
    (refusal,) = repeated_url_refusals(
        ["http://127.0.0.1:3", "http://localhost:3", "http://127.0.0.1:4"]
    )
    assert refusal.value == "http://localhost:3"
    assert "named twice: this is http://127.0.0.1:3" in refusal.rule
    distinct_urls = ["http://127.0.0.1:3", "http://127.0.0.1:4", "not a url"]
    assert list(repeated_url_refusals(distinct_urls)) == []
