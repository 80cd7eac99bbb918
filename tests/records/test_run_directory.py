"""Where a run's directory is, and the configuration's text in it."""

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from megatron_rl.config import schema
from megatron_rl.config.cli import compose
from megatron_rl.config.keys import declared_keys
from megatron_rl.records.run_directory import RunDirectory, RunDirectoryTaken, RunDirectoryUnusable, path_of, to_yaml


def test_run_directory(tmp_path: Path) -> None:
    noon = datetime.datetime(2025, 1, 2, 12, 0, 5)
    unnamed = schema.RunSettings(root=str(tmp_path), experiment="quickstart")
    assert path_of(unnamed, noon) == tmp_path / "quickstart-20250102-120005"
    assert path_of(dataclasses.replace(unnamed, name="mine"), noon) == tmp_path / "mine"


def test_text_of_a_configuration_holds_every_key_and_reads_back() -> None:
    config = compose(["run.name='1e3'", "optimizer.lr=3e-5", "algo=gspo"])
    tree: Any = OmegaConf.to_container(OmegaConf.create(to_yaml(config)))
    assert TypeAdapter(schema.Configuration).validate_python(tree) == config
    keys = {f"{section}.{key}" for section, inner in tree.items() if isinstance(inner, dict) for key in inner}
    sections = {key.partition(".")[0] for key in declared_keys() if "." in key}
    assert keys | {"seed"} == declared_keys("gspo").keys() - sections


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    noon = datetime.datetime(2025, 1, 2, 12, 0, 5)
    config = compose([f"run.root={tmp_path}", "run.name=mine"])
    directory = RunDirectory.create(config, noon)
    assert directory.path == tmp_path / "mine"
    assert {path.name for path in directory.path.iterdir()} == {
        "logs", "rollouts", "checkpoints", "config.yaml", "versions.json"
    }  # fmt: skip
    with pytest.raises(RunDirectoryTaken, match=r"run\.name='mine'.*choose another"):
        RunDirectory.create(config, noon)
    blocked = dataclasses.replace(config, run=dataclasses.replace(config.run, root=str(tmp_path / "mine/config.yaml")))
    with pytest.raises(RunDirectoryUnusable, match=r"run\.root"):
        RunDirectory.create(blocked, noon)
