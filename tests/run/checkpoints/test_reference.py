"""A resumed run keeps the reference of its KL penalty, or is refused by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.run.checkpoints import reference
from megatron_rl.run.checkpoints.manager import SavePoint
from megatron_rl.run.checkpoints.reference import identify_reference
from megatron_rl.run.checkpoints.resume import ResumePoint
from tests.support.checkpoint_managers import FakeRanks, make_manager
from tests.support.checkpoints import make_state
from tests.support.configurations import configuration_of
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.thread_ranks import gather_bytes, run_on_ranks

JOB: Any = SimpleNamespace(rank=0, world_size=1, control_group=None)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A checkpoint whose weights are in three files."""
    directory = tmp_path / "reference"
    shutil.copytree(TWO_DIGIT_ADDITION, directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": files}))
    return directory


def configuration(path: Path, *overrides: str) -> Configuration:
    return configuration_of(["experiment=smoke", f"algo.kl.reference={path}", *overrides])


def with_penalty(path: Path, resume: str = "auto") -> Configuration:
    overrides = [f"run.resume={resume}", "run.name=a"] if resume == "auto" else []
    return configuration(path, "algo.kl.coef=0.1", *overrides)


def resumed_from(digest: str) -> ResumePoint:
    state = msgspec.structs.replace(make_state(4), reference=digest)
    return ResumePoint(Path("runs/a/checkpoints/iter_0000004"), state)


def change_a_weight(directory: Path) -> None:
    file = directory / "part-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_the_digest_follows_the_weights_and_not_their_place(weights: Path, tmp_path: Path) -> None:
    digest = identify_reference(with_penalty(weights), ResumePoint(), JOB)
    assert len(digest) == 64
    new_place = tmp_path / "moved"
    weights.rename(new_place)
    assert identify_reference(with_penalty(new_place), resumed_from(digest), JOB) == digest
    change_a_weight(new_place)
    assert identify_reference(with_penalty(new_place), ResumePoint(), JOB) != digest


def test_ranks_share_the_hashing_and_agree(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = identify_reference(with_penalty(weights), ResumePoint(), JOB)
    monkeypatch.setattr(reference, "gather_bytes", gather_bytes)
    c = with_penalty(weights)

    def on_rank(group: Any) -> str:
        job: Any = SimpleNamespace(rank=group[1], world_size=2, control_group=group)
        return identify_reference(c, ResumePoint(), job)

    assert run_on_ranks(2, on_rank) == [digest, digest]


def test_a_resumed_run_with_another_reference_is_refused_by_name(weights: Path) -> None:
    digest = identify_reference(with_penalty(weights), ResumePoint(), JOB)
    change_a_weight(weights)
    with pytest.raises(Failure) as error:
        identify_reference(with_penalty(weights), resumed_from(digest), JOB)
    message = str(error.value)
    assert message.startswith(f"algo.kl.reference={str(weights)!r}: its weights (SHA-256 ")
    assert digest[:12] in message
    assert "another run.name" in message
    assert error.value.exit_code == ExitCode.REFUSED


def test_a_new_run_and_a_new_penalty_may_choose_their_reference(weights: Path) -> None:
    """A run from another run's checkpoint, and a run whose checkpoint had no penalty."""
    digest = identify_reference(with_penalty(weights), ResumePoint(), JOB)
    path = with_penalty(weights, resume="never")
    path = replace(path, run=replace(path.run, resume="runs/a"))
    assert identify_reference(path, resumed_from("0" * 64), JOB) == digest
    assert identify_reference(with_penalty(weights), resumed_from(""), JOB) == digest


def test_runs_without_a_penalty_have_no_digest() -> None:
    c = configuration_of(["experiment=smoke"])
    assert identify_reference(c, resumed_from("0" * 64), JOB) == ""
    recording = configuration_of(["experiment=smoke", "mode=rollout_only", "algo.kl.coef=0.1"])
    assert identify_reference(recording, ResumePoint(), JOB) == ""


def test_checkpoints_hold_the_digest() -> None:
    ranks = FakeRanks()
    manager = make_manager(ranks)
    manager.reference = "abc"
    manager.save(SavePoint(make_state(2).position))
    assert [state.reference for state in ranks.states] == ["abc"]
