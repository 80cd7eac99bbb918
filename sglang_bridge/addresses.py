"""Addresses that engines may listen on, and this machine's address for others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from urllib.parse import SplitResult, urlsplit

import psutil

from sglang_bridge.refusal import Refusal

LOOPBACK = "127.0.0.1"
_PUBLIC_ADDRESS = ("192.0.2.1", 9)  # reserved for documentation: on no machine, nothing is sent
# The shared address space of RFC 6598, which the Internet does not route either. Pods and nodes of
# EKS, GKE and Tailscale have such addresses.
_SHARED_SPACE = ipaddress.ip_network("100.64.0.0/10")
_REMEDY = "Use http://HOST:PORT with a loopback or private address"


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # a datagram socket only selects the route
        return str(probe.getsockname()[0])


def node_address(num_nodes: int) -> str:
    """The address on which this node's engines listen, and on rank 0 the hub.

    With one node it is loopback, else this node's address on the route to torchrun's master.
    Debian's /etc/hosts gives a machine's own name the loopback address 127.0.1.1. The master then
    has the address of its default route, because other nodes cannot reach loopback.
    """
    if num_nodes == 1:
        return LOOPBACK
    master = os.environ["MASTER_ADDR"]
    address = address_towards(master, int(os.environ["MASTER_PORT"]))
    if ipaddress.ip_address(address).is_loopback and master not in (LOOPBACK, "localhost"):
        with contextlib.suppress(OSError):  # a machine without a route
            return address_towards(*_PUBLIC_ADDRESS)
    return address


def interface_of(host: str) -> str | None:
    """The network interface of this machine that has the address `host`, None without one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None


def require_private_address(host: str) -> None:
    """Raise `ValueError` unless every address of `host` is loopback or private."""
    rule = _public_address_rule(host)
    if rule:
        raise ValueError(
            f"{rule}; use {LOOPBACK} or the node's address in the cluster's private network"
        )


def url_refusal(url: str) -> Refusal | None:
    """Check that a URL can be an engine's; None if it can. Resolves the host's name."""
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is not a number
    except ValueError as error:
        return _refuse(url, f"It is not a URL ({error})")
    if parts.scheme == "https":
        remedy = f"Terminate TLS in front of it, or leave it out. {_REMEDY}"
        return _refuse(url, "The trainer speaks plain HTTP to its engines", remedy)
    return _http_refusal(url, parts, port)


def _http_refusal(url: str, parts: SplitResult, port: int | None) -> Refusal | None:
    if parts.scheme != "http" or not parts.hostname or port is None:
        return _refuse(url, "An engine's address has a scheme, a host and a port")
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        return _refuse(url, "An engine's address has no user, path, query or fragment")
    if ":" in parts.hostname or port == 0:
        return _refuse(url, "An engine's address is a name or IPv4, with a port from 1")
    rule = _public_address_rule(parts.hostname)
    return _refuse(url, rule) if rule else None


def repeated_url_refusals(urls: Sequence[str]) -> Iterator[Refusal]:
    """Refuse URLs of one server under two names, which would get the same weights twice at once."""
    url_by_address: dict[tuple[str, int | None], str] = {}
    for url in urls:
        others = [url_by_address.setdefault(address, url) for address in _addresses(url)]
        other = next((other for other in others if other is not url), None)
        if other is not None:
            yield _refuse(url, f"An engine is named twice: this is {other}", "Name each one once")


def _public_address_rule(host: str) -> str:
    """The rule that `host` breaks; empty if every address of it is loopback or private."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except socket.gaierror as error:
        return f"engine host {host!r} cannot be resolved: {error}"
    for address in addresses:
        ip = ipaddress.ip_address(str(address).split("%")[0])
        if not _is_private(ip):
            return (
                f"engine host {host!r} is {ip}, which is not a loopback or private address: "
                "engines obey whoever reaches them"
            )
    return ""


def _is_private(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True for an address that the Internet does not route, and that one machine has."""
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip  # is_link_local knows only the latter
    if ip.is_unspecified or ip.is_link_local or ip.is_multicast:
        return False
    return ip.is_loopback or ip.is_private or ip in _SHARED_SPACE


def _addresses(url: str) -> list[tuple[str, int | None]]:
    """The addresses that a URL leads to; none if `url_refusal` refuses it."""
    try:
        parts = urlsplit(url)
        infos = socket.getaddrinfo(parts.hostname, None, family=socket.AF_INET)
        hosts = {str(info[4][0]) for info in infos}
        return [(host, parts.port) for host in sorted(hosts)]
    except (ValueError, OSError):
        return []


def _refuse(url: str, rule: str, remedy: str = _REMEDY) -> Refusal:
    return Refusal("engine.urls", url, rule, remedy)
