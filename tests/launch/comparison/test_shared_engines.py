"""Engines that the runs of a comparison use in turn: their keys are private, and nothing of them is
left.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from launch.comparison.shared_engines import check_shareable, shared_engines
from launch.comparison.variants import ComparisonRefused
from megatron_rl.config.cli import compose
from megatron_rl.contracts.launch_facts import LaunchFacts
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineUnhealthy
from sglang_bridge.keys import RunKeys, read_keys
from sglang_bridge.settings import ServerPlace


class Services:
    """In place of a node's processes."""

    said: list[str]
    places: list[ServerPlace]
    keys: RunKeys
    healthy = True

    def __init__(self, *, node: int, log_directory: Path) -> None:
        Services.said = []

    def start_engines(self, settings: Any, places: Iterable[ServerPlace], keys: RunKeys) -> None:
        Services.places, Services.keys = list(places), keys

    def wait_healthy(self, deadline_seconds: float) -> list[Engine]:
        if not self.healthy:
            raise EngineUnhealthy("it did not start", log_tail="")
        return [Engine(url=f"http://127.0.0.1:{9000 + index}") for index in range(len(self.places))]

    def stop(self) -> None:
        Services.said.append("stopped")


@pytest.fixture(autouse=True)
def services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.engines.node_processes.NodeServices", Services)


def test_each_place_is_a_run_beside_one_engine(tmp_path: Path) -> None:
    configuration = compose(["experiment=smoke"])
    with shared_engines(configuration, 2, tmp_path / "engines") as places:
        composed = [compose(["experiment=smoke", *place]).engine for place in places]
        assert [engine.urls for engine in composed] == [
            ["http://127.0.0.1:9000"],
            ["http://127.0.0.1:9001"],
        ]
        key_file = composed[0].key_file
        assert key_file is not None and read_keys(Path(key_file)) == Services.keys, (
            "a file that only its owner reads"
        )
        assert [
            (place.model_path, place.return_routes, place.seed) for place in Services.places
        ] == [(configuration.model.path, True, 0), (configuration.model.path, True, 1)]
    assert Services.said == ["stopped"] and not Path(key_file).exists()


def test_engines_that_do_not_start_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Services, "healthy", False)
    with pytest.raises(EngineUnhealthy), shared_engines(compose(["experiment=smoke"]), 1, tmp_path):
        pass
    assert Services.said == ["stopped"] and list(tmp_path.iterdir()) == []


def test_machines_with_gpus_are_refused() -> None:
    with pytest.raises(ComparisonRefused, match=r"--shared-engines: 2 GPU\(s\) are visible"):
        check_shareable([], LaunchFacts(num_gpus=2))
