"""A checkpoint of one rank: whole or not there, whatever the disk does, and read without trusting
it.
"""

import os
import pickle
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor

from launch.testbed.policies import ADAM, TWO_DIGIT_ADDITION, make_policy
from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.commands import Checkpoint, WaitForSave
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.models.families import read_shape
from megatron_rl.run.checkpoints.manifest import changed_files, read_manifest
from megatron_rl.run.checkpoints.resume import CheckpointUnusable, ResumePoint
from megatron_rl.run.checkpoints.saving import CheckpointWriter, SaveResult
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.modes.evaluate import open_weights
from tests.support.checkpoints import make_state


@pytest.fixture(scope="module")
def worker(megatron: Any) -> Any:
    """What saving needs of a worker, before its first optimizer step."""
    _, policy = make_policy(TWO_DIGIT_ADDITION, ParallelSettings(), GrpoSettings())
    return SimpleNamespace(
        layout=megatron,
        policy=policy,
        optimizer=DistributedAdam(policy.models, ADAM, total_steps=9),
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    if os.geteuid():
        pytest.skip("mounting a small disk needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=False)


def whole(checkpoint: Path) -> bool:
    manifest = read_manifest(checkpoint)
    return not changed_files(checkpoint, manifest, manifest.files) and "common.pt" in manifest.files


def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(worker: Any, disk: Path) -> None:
    checkpoints = CheckpointWriter(worker, CheckpointStore(disk / "checkpoints"), nbytes=0, keep=2)
    assert checkpoints.save(Checkpoint(1, b"{}")).problem == ""
    outcome = checkpoints.save(Checkpoint(2, b"{}"))
    assert "disk is full" in outcome.problem
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["iter_0000001"]
    assert whole(disk / "checkpoints/iter_0000001")


def test_room_is_asked_for_before_anything_is_written(worker: Any, tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path / "checkpoints")
    outcome = CheckpointWriter(worker, shelf, nbytes=2**60, keep=2).save(Checkpoint(1, b"{}"))
    assert "MiB are free, and a checkpoint takes 1,099,511,627,776 MiB" in outcome.problem
    assert list(shelf.folder.iterdir()) == []


def test_mistakes_of_the_program_are_no_full_disks(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr("megatron_rl.run.checkpoints.saving.write_tensors", broken)
    with pytest.raises(TypeError):
        CheckpointWriter(worker, CheckpointStore(tmp_path / "checkpoints"), nbytes=0, keep=2).save(
            Checkpoint(1, b"{}")
        )


def test_what_a_checkpoint_wants_to_run_is_not_run(worker: Any, tmp_path: Path) -> None:
    checkpoints = CheckpointWriter(
        worker, CheckpointStore(tmp_path / "checkpoints"), nbytes=0, keep=2
    )
    assert checkpoints.save(Checkpoint(1, b"{}")).problem == ""
    saved = tmp_path / "checkpoints/iter_0000001"
    before = {name: weight.clone() for name, weight in worker.policy.models[0].named_parameters()}
    with torch.no_grad():
        for weight in worker.policy.models[0].parameters():
            weight.zero_()
    load_tensors(worker.policy.models, worker.optimizer, saved, optimizer_steps=0)
    assert all(
        weight.equal(before[name]) for name, weight in worker.policy.models[0].named_parameters()
    )

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    for evil in (
        pickle.dumps(Harm()),
        b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n(V/tmp\ntR.",
    ):
        (saved / ".metadata").write_bytes(evil)
        with pytest.raises(ValueError, match=r"\.metadata is not the metadata of tensors"):
            load_tensors(worker.policy.models, worker.optimizer, saved, optimizer_steps=0)
    assert not (tmp_path / "harm").exists()


def test_a_checkpoint_of_another_model_is_named_and_not_a_traceback(
    worker: Any, megatron: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = CheckpointStore(tmp_path / "checkpoints")
    assert (
        CheckpointWriter(worker, shelf, nbytes=0, keep=2).save(Checkpoint(1, b"{}")).problem == ""
    )
    start = ResumePoint(shelf.path(1), make_state(1))
    shape = replace(read_shape(TWO_DIGIT_ADDITION), moe_ffn_hidden_size=48)
    settings = ModelSettings(path=str(TWO_DIGIT_ADDITION))
    models = wrap_data_parallel(build_models(shape, settings, ParallelSettings()))
    policy, optimizer = SimpleNamespace(models=models), DistributedAdam(models, ADAM, total_steps=9)
    other: Any = SimpleNamespace(layout=megatron, policy=policy, optimizer=optimizer)
    said = rf"{shelf.path(1)} cannot be loaded: .*experts.*Give the model"
    with pytest.raises(CheckpointUnusable, match=said) as refused:
        start.load(other)
    assert refused.value.exit_code == ExitCode.BAD_DATA and "Traceback" not in str(refused.value)
    monkeypatch.setattr(
        "megatron_rl.run.modes.evaluate.parallel.initialize", lambda *_, **__: None
    )  # it is, here
    c, job = compose(["experiment=smoke", "mode=eval"]), megatron
    with pytest.raises(CheckpointUnusable, match=said):
        list(open_weights(c, shape, shelf.path(1), job)())
    (shelf.path(1) / "metadata.json").unlink()
    with pytest.raises(
        CheckpointUnusable, match=r"cannot be loaded: .*is not a distributed checkpoint"
    ):
        start.load(worker)


def test_what_trains_meanwhile_does_not_change_what_is_saved(worker: Any, tmp_path: Path) -> None:
    shelf, group = CheckpointStore(tmp_path / "checkpoints"), worker.layout.control_group
    checkpoints = CheckpointWriter(worker, shelf, nbytes=0, keep=2, background=group)
    before = {name: weight.clone() for name, weight in worker.policy.models[0].named_parameters()}
    assert checkpoints.save(Checkpoint(3, b"{}", background=True)) is None
    with torch.no_grad():
        for weight in worker.policy.models[0].parameters():
            weight.add_(1.0)
    assert checkpoints.wait_for_save(WaitForSave()) == SaveResult(
        3, nbytes=read_manifest(shelf.path(3)).nbytes
    )
    assert whole(shelf.path(3)) and checkpoints.wait_for_save(WaitForSave()) is None
    load_tensors(worker.policy.models, worker.optimizer, shelf.path(3), optimizer_steps=0)
    assert all(
        weight.equal(before[name]) for name, weight in worker.policy.models[0].named_parameters()
    )


@pytest.mark.parametrize("copy", [False, True])
def test_a_save_holds_as_much_memory_as_preflight_says(worker: Any, copy: bool) -> None:
    def held(value: Any) -> list[torch.Tensor]:
        whole = isinstance(value, CheckpointableShardedTensor)
        return [value._sh_ten.data] if whole else [shard.tensor for shard in value.local_shards()]

    parts = {"optimizer": dict[int, int](), "model": dict[int, int]()}
    for name, value in gather_tensors(worker.policy.models, worker.optimizer, copy=copy).items():
        for storage in (tensor.untyped_storage() for tensor in held(value)):
            parts["optimizer" if name.startswith("optimizer.") else "model"][storage.data_ptr()] = (
                storage.nbytes()
            )
    parameters = sum(weight.numel() for weight in worker.policy.models[0].parameters())
    optimizer, model = (sum(parts[name].values()) / parameters for name in ("optimizer", "model"))
    assert (optimizer, model) == pytest.approx((12, 4), rel=0.01), (
        "bytes a parameter; padding comes on top"
    )
