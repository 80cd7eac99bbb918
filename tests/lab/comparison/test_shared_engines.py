"""Shared engines of a comparison: their keys are private, and nothing is left of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.launch_facts import LaunchFacts
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import RunKeys, read_keys
from sglang_bridge.settings import ServerPlace
from tests.lab.comparison.shared_engines import check_shareable, shared_engines
from tests.lab.comparison.variants import ComparisonRefused
from tests.support.configurations import configuration_of


class FakeProcesses:
    """Replaces the processes of a node."""

    calls: list[str]
    places: list[ServerPlace]
    keys: RunKeys
    healthy = True

    def __init__(self, *, node: int, log_directory: Path) -> None:
        FakeProcesses.calls = []

    def start_engines(self, settings: Any, places: Iterable[ServerPlace], keys: RunKeys) -> None:
        FakeProcesses.places = list(places)
        FakeProcesses.keys = keys

    def wait_healthy(self, deadline_seconds: float) -> list[Engine]:
        if not self.healthy:
            raise EngineError("it did not start", log_tail="")
        return [Engine(url=f"http://127.0.0.1:{9000 + index}") for index in range(len(self.places))]

    def stop(self) -> None:
        FakeProcesses.calls.append("stop")


@pytest.fixture(autouse=True)
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.engines.node.node_processes.NodeProcesses", FakeProcesses)


@pytest.mark.slow
def test_runs_connect_to_one_engine_each_with_a_private_key_file(tmp_path: Path) -> None:
    configuration = configuration_of(["experiment=smoke"])
    with shared_engines(configuration, 2, tmp_path / "engines") as overrides:
        engines = [configuration_of(["experiment=smoke", *words]).engine for words in overrides]
        urls = [engine.urls for engine in engines]
        assert urls == [["http://127.0.0.1:9000"], ["http://127.0.0.1:9001"]]
        assert engines[0].key_file is not None
        key_file = Path(engines[0].key_file)
        assert read_keys(key_file) == FakeProcesses.keys
        path = configuration.model.path
        places = [(p.model_path, p.return_routes, p.seed) for p in FakeProcesses.places]
        assert places == [(path, True, 0), (path, True, 1)]
    assert FakeProcesses.calls == ["stop"] and not key_file.exists()


def test_engines_that_do_not_start_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcesses, "healthy", False)
    with (
        pytest.raises(EngineError),
        shared_engines(configuration_of(["experiment=smoke"]), 1, tmp_path),
    ):
        pass
    assert FakeProcesses.calls == ["stop"] and list(tmp_path.iterdir()) == []


def test_machines_with_gpus_are_refused() -> None:
    with pytest.raises(ComparisonRefused, match=r"--shared-engines: 2 GPU\(s\) are visible"):
        check_shareable([], LaunchFacts(num_gpus=2))
