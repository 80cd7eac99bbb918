"""Engines are asked for routes only where the trainer replays theirs."""

import contextlib
import dataclasses
from pathlib import Path

import pytest

from launch.testbed.engine_rollouts import ONLY_RANK
from megatron_rl.config.cli import compose
from megatron_rl.engines.engines import Engines
from megatron_rl.models.families import read_shape
from megatron_rl.records.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("replay", "asked"), [("rollout", True), ("trainer", False), ("off", False)]
)
def test_routes_are_recorded_and_returned_where_they_are_replayed(
    tmp_path: Path, replay: str, asked: bool
) -> None:
    configuration = compose(["experiment=smoke", f"train.replay={replay}"])
    shape = read_shape(configuration.model.path)
    job = dataclasses.replace(ONLY_RANK, local_rank=1, local_world_size=2)  # it starts nothing
    engines = Engines(configuration, shape, job, RunDirectory(tmp_path), contextlib.ExitStack())
    assert [place.return_routes for place in engines._places()] == [asked]
    assert (engines._configure([], 0).routes is not None) == asked
