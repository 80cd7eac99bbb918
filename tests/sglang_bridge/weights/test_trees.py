"""Groups that an owner opens, keeps and drops as engines come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import RequestFailed
from sglang_bridge.weights import distributed, weight_group
from sglang_bridge.weights.calls import start_call
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.weight_group import WeightGroup
from tests.sglang_bridge.weights.group_peer import PeerAdmin


class Group:
    """A group that was formed. log: what happens to groups, with the numbers of their engines."""

    log: ClassVar[list[str]] = []

    def __init__(self, admins: Sequence[AdminClient]) -> None:
        self.admins = tuple(admins)
        self._note("open")

    @classmethod
    def open(cls, admins: Sequence[AdminClient], **options: Any) -> Group:
        return cls(admins)

    def close(self) -> None:
        self._note("close")

    def abandon(self) -> None:
        self._note("abandon")

    def _note(self, what: str) -> None:
        numbers = "".join(str(admin.address[1]) for admin in self.admins)
        self.log.append(f"{what} {numbers}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(distributed, "WeightGroup", Group)
    monkeypatch.setattr(Group, "log", [])
    return Group.log


def open_transport(size: int) -> DistributedTransport:
    return DistributedTransport(backend="gloo", timeout_seconds=5.0, engines_per_tree=size)


def engines(count: int) -> list[PeerAdmin]:
    return [PeerAdmin(f"http://127.0.0.1:{number}", None) for number in range(1, count + 1)]


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_that_joins_leaves_the_groups_of_others_as_they_are(
    log: list[str], size: int
) -> None:
    sender = open_transport(size)
    one, two, three = engines(3)
    assert sender.connect([one, two]) == {}
    log.clear()
    assert sender.connect([three]) == {}
    assert sender.connect([one, two, three]) == {}
    assert log == ["open 3"]


def test_an_engine_that_does_not_answer_is_not_asked_to_leave_its_group(log: list[str]) -> None:
    """Such a request would take its whole limit before the others get anything."""
    sender = open_transport(2)
    one, two, three = engines(3)
    assert sender.connect([one, two, three]) == {}
    log.clear()
    two.is_up = False
    assert sender.connect([one, two, three]).keys() == {two.url}
    assert log == ["abandon 12", "close 3", "open 13"]
    log.clear()
    one.is_up = False
    assert sender.connect([three]) == {}
    assert log == ["abandon 13", "open 3"]


def test_an_engine_that_is_missing_in_one_update_costs_its_tree_alone(log: list[str]) -> None:
    sender = open_transport(2)
    one, two, three, four = engines(4)
    assert sender.connect([one, two, three, four]) == {}
    log.clear()
    assert sender.connect([one, three, four]) == {}
    assert log == ["abandon 12", "close 34", "open 13", "open 4"]


class Store:
    """A rendezvous at which ranks store their addresses."""

    port = 1

    def __init__(self) -> None:
        self._keys: list[str] = []

    def arrive(self, request: dict[str, Any]) -> None:
        """Store the address of a rank. request: to join a group."""
        self._keys.append(f"{request['name']}/{request['rank_offset']}")

    def num_keys(self) -> int:
        return len(self._keys)

    def list_keys(self) -> list[str]:
        return list(self._keys)


def test_a_group_that_an_engine_refuses_late_is_dropped_and_the_engine_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped_groups: list[object] = []
    store = Store()
    monkeypatch.setattr(weight_group, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(weight_group, "join_as_source", lambda *_, **__: "group")
    monkeypatch.setattr(weight_group, "abort", dropped_groups.append)
    monkeypatch.setattr(weight_group, "start_call", _start_call)

    class Joining(PeerAdmin):
        def init_weights_update_group(self, **request: Any) -> None:
            store.arrive(request)

    class Refusing(PeerAdmin):
        def init_weights_update_group(self, **request: Any) -> None:
            store.arrive(request)
            time.sleep(0.2)
            raise RequestFailed("not today")

    admins = [Joining("http://127.0.0.1:1", None), Refusing("http://127.0.0.1:2", None)]
    with pytest.raises(RequestFailed, match=r"^http://127\.0\.0\.1:2: not today$"):
        WeightGroup.open(admins, backend="gloo", timeout=5.0, joining=threading.Lock())
    assert dropped_groups == ["group"]


def test_engines_that_do_not_say_whether_they_joined_share_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    monkeypatch.setattr(weight_group, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(weight_group, "join_as_source", lambda *_, **__: "group")
    monkeypatch.setattr(weight_group, "abort", lambda group: None)

    class Slow(PeerAdmin):
        def init_weights_update_group(self, **request: Any) -> None:
            store.arrive(request)
            time.sleep(0.6 * int(self.url[-1]))

    admins = [Slow(f"http://127.0.0.1:{number}", None) for number in (1, 2)]
    with pytest.raises(TimeoutError):
        WeightGroup.open(admins, backend="gloo", timeout=0.9, joining=threading.Lock())


def _start_call(function: Any) -> Any:
    """Run a call that drops a group at once, and others in a thread."""
    future = start_call(function)
    if getattr(function, "__name__", "") == "<lambda>":
        future.result(5.0)
    return future
