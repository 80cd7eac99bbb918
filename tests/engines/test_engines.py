"""The configuration of collectors, and the places of engines."""

import dataclasses
import threading

import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.engines.engines import (
    collector_template,
    name_external_engines,
    name_wide_routes,
)
from megatron_rl.engines.server_places import server_places
from megatron_rl.models.families import read_shape
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import create_keys
from tests.support.configurations import configuration_of
from tests.support.engine_rollouts import ONLY_RANK


@pytest.mark.parametrize(
    ("replay", "has_routes"), [("rollout", True), ("trainer", False), ("off", False)]
)
def test_routes_are_requested_only_for_replay_of_rollouts(replay: str, has_routes: bool) -> None:
    c = configuration_of(["experiment=smoke", f"train.replay={replay}"])
    template = collector_template(c, read_shape(c.model.path), create_keys())
    assert (template.routes is not None) == has_routes


def test_engines_get_the_gpus_behind_the_ranks_and_seeds_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    c = configuration_of(["experiment=smoke"])
    engine = dataclasses.replace(c.engine, count=2, tp=2)
    job = dataclasses.replace(ONLY_RANK, local_world_size=4, node=1, num_nodes=1)
    places = server_places(engine, c.model, job, seed=7, return_routes=True)
    assert [place.gpus for place in places] == [(4, 5), (6, 7)]
    assert [place.seed for place in places] == [9, 10]
    assert all(place.node == 1 for place in places)


def test_a_wait_names_the_engines_or_the_file_that_lists_them() -> None:
    urls = ["http://10.0.0.1:1", "http://10.0.0.2:1"]
    assert name_external_engines(EngineSettings(urls=urls)) == ", ".join(urls)
    settings = EngineSettings(urls="engines.txt")
    assert name_external_engines(settings) == "the engines in engines.txt"


class EngineWithPlugin(AdminClient):
    """An engine that says whether it has the plugin. None: it does not answer."""

    def __init__(self, url: str, narrows: bool | None) -> None:
        super().__init__(Engine(url=url), create_keys())
        self._narrows = narrows

    def narrows_routes(self) -> bool:
        if self._narrows is None:
            raise RequestFailed("no answer")
        return self._narrows


def test_engines_that_send_wide_routes_are_named_once_with_the_remedy() -> None:
    lines: list[str] = []
    states = (False, True, None, False)
    engines = [EngineWithPlugin(f"http://10.0.0.{i}:1", state) for i, state in enumerate(states)]
    name_wide_routes(engines, lines.append)
    (line,) = lines
    assert line.startswith("http://10.0.0.0:1, http://10.0.0.3:1: the plugin narrow_routes")
    assert "SGLANG_BRIDGE_NARROW_ROUTES=1" in line
    name_wide_routes(engines[1:3], lines.append)
    assert len(lines) == 1


class Meeting(EngineWithPlugin):
    """An engine that answers only while all others are asked, too."""

    def __init__(self, url: str, barrier: threading.Barrier) -> None:
        super().__init__(url, False)
        self._barrier = barrier

    def narrows_routes(self) -> bool:
        self._barrier.wait(10)
        return super().narrows_routes()


def test_engines_are_asked_at_the_same_time_for_their_routes() -> None:
    barrier = threading.Barrier(3)
    lines: list[str] = []
    name_wide_routes([Meeting(f"http://10.0.0.{i}:1", barrier) for i in range(3)], lines.append)
    assert lines[0].startswith("http://10.0.0.0:1, http://10.0.0.1:1, http://10.0.0.2:1: ")


def test_nodes_that_share_engines_hold_equal_parts_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    c = configuration_of(["experiment=smoke"])
    engine = dataclasses.replace(c.engine, count=2, tp=4, nodes_per_engine=2)
    seeds = []
    for node in range(4):
        job = dataclasses.replace(ONLY_RANK, local_world_size=3, node=node, num_nodes=1)
        places = server_places(engine, c.model, job, seed=7, return_routes=True)
        assert [place.gpus for place in places] == [(3, 4), (5, 6)]
        assert [(place.num_servers, place.server_rank) for place in places] == [(2, node % 2)] * 2
        seeds.append([place.seed for place in places])
    assert seeds == [[7, 8], [7, 8], [9, 10], [9, 10]]
