"""Checkpoints of one rank: complete or absent after disk errors, and read without trusting them."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

import torch.distributed as dist
from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from launch.testbed.policies import ADAM, TWO_DIGIT_ADDITION, make_policy
from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.commands import Checkpoint, WaitForSave
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.mcore.checkpoint import gather_tensors, load_tensors, write_tensors
from megatron_rl.mcore.checkpoint.tensor_reader import TensorReader
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.models.families import read_shape
from megatron_rl.run.checkpoints.manifest import changed_files, read_manifest
from megatron_rl.run.checkpoints.resume import CheckpointUnusable, ResumePoint
from megatron_rl.run.checkpoints.saving import CheckpointWriter, SaveResult
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.modes.evaluate import checkpoint_weights
from tests.support.checkpoints import make_state


@pytest.fixture(scope="module")
def worker(megatron: Any) -> Any:
    """The parts of a worker that saving needs, before its first optimizer step."""
    _, policy = make_policy(TWO_DIGIT_ADDITION, ParallelSettings(), GrpoSettings())
    return SimpleNamespace(
        layout=megatron,
        policy=policy,
        optimizer=DistributedAdam(policy.models, ADAM, total_steps=9),
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one and a half checkpoints."""
    if os.geteuid():
        pytest.skip("mounting a small disk needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=False)


def is_complete(checkpoint: Path) -> bool:
    manifest = read_manifest(checkpoint)
    return not changed_files(checkpoint, manifest, manifest.files) and "common.pt" in manifest.files


def test_full_disk_is_reported_and_keeps_the_previous_checkpoint(worker: Any, disk: Path) -> None:
    checkpoints = CheckpointWriter(worker, CheckpointStore(disk / "checkpoints"), nbytes=0, keep=2)
    assert checkpoints.save(Checkpoint(1, b"{}")).problem == ""
    outcome = checkpoints.save(Checkpoint(2, b"{}"))
    assert "disk is full" in outcome.problem
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["iter_0000001"]
    assert is_complete(disk / "checkpoints/iter_0000001")


def test_free_space_is_checked_before_anything_is_written(worker: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    outcome = CheckpointWriter(worker, store, nbytes=2**60, keep=2).save(Checkpoint(1, b"{}"))
    assert "MiB are free, and a checkpoint takes 1,099,511,627,776 MiB" in outcome.problem
    assert list(store.folder.iterdir()) == []


def test_programming_error_is_not_reported_as_a_full_disk(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr("megatron_rl.run.checkpoints.saving.write_tensors", fail)
    with pytest.raises(TypeError):
        CheckpointWriter(worker, CheckpointStore(tmp_path / "checkpoints"), nbytes=0, keep=2).save(
            Checkpoint(1, b"{}")
        )


def test_code_in_checkpoint_metadata_is_not_run(worker: Any, tmp_path: Path) -> None:
    checkpoints = CheckpointWriter(
        worker, CheckpointStore(tmp_path / "checkpoints"), nbytes=0, keep=2
    )
    assert checkpoints.save(Checkpoint(1, b"{}")).problem == ""
    checkpoint = tmp_path / "checkpoints/iter_0000001"
    before = {name: weight.clone() for name, weight in worker.policy.models[0].named_parameters()}
    with torch.no_grad():
        for weight in worker.policy.models[0].parameters():
            weight.zero_()
    load_tensors(worker.policy.models, worker.optimizer, checkpoint, optimizer_steps=0)
    assert all(
        weight.equal(before[name]) for name, weight in worker.policy.models[0].named_parameters()
    )

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    for metadata in (
        pickle.dumps(Harm()),
        b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n(V/tmp\ntR.",
    ):
        (checkpoint / ".metadata").write_bytes(metadata)
        with pytest.raises(ValueError, match=r"\.metadata is not the metadata of tensors"):
            load_tensors(worker.policy.models, worker.optimizer, checkpoint, optimizer_steps=0)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_after_a_resume_is_bit_exact(megatron: Any, tmp_path: Path, dtype: str) -> None:
    def random_models(seed: int) -> tuple[Any, DistributedAdam]:
        torch.manual_seed(seed)
        _, policy = make_policy(TWO_DIGIT_ADDITION, ParallelSettings(), GrpoSettings(), dtype=dtype)
        return policy.models, DistributedAdam(policy.models, ADAM, total_steps=9)

    def step(models: Any, optimizer: DistributedAdam, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        for parameter in models[0].parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        assert optimizer.step(loss_is_finite=True).is_applied

    models, optimizer = random_models(1)
    step(models, optimizer, 1)
    write_tensors(gather_tensors(models, optimizer), tmp_path, dist.group.WORLD)
    step(models, optimizer, 2)
    resumed_models, resumed_optimizer = random_models(2)
    load_tensors(resumed_models, resumed_optimizer, tmp_path, optimizer_steps=1)
    step(resumed_models, resumed_optimizer, 2)
    weights = dict(models[0].named_parameters())
    for name, weight in resumed_models[0].named_parameters():
        assert weight.dtype == getattr(torch, dtype) and weight.equal(weights[name]), name


def test_code_under_a_tensor_name_is_not_run(worker: Any, tmp_path: Path) -> None:
    """A metadata entry of bytes would make torch unpickle the data of a tensor."""
    group = worker.layout.control_group
    write_tensors(gather_tensors(worker.policy.models, worker.optimizer), tmp_path, group)
    metadata = FileSystemReader(tmp_path).read_metadata()
    name, tensor = next(iter(metadata.state_dict_metadata.items()))
    entry = BytesStorageMetadata()
    vars(entry)["size"] = tensor.size  # as Megatron's check of shapes reads it
    metadata.state_dict_metadata[name] = entry

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save(Harm(), tmp_path / "payload")
    length = (tmp_path / "payload").stat().st_size
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("payload", 0, length)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata of tensors"):
        load_tensors(worker.policy.models, worker.optimizer, tmp_path, optimizer_steps=0)
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata of tensors"):
        TensorReader(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_metadata_of_another_kind_is_refused(tmp_path: Path) -> None:
    for value in ({}, Metadata({"weight": torch.Size([1])})):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(ValueError, match=r"\.metadata is not the metadata of tensors"):
            TensorReader(tmp_path)


def test_places_of_tensors_are_checked_in_the_first_save_alone(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check gathers the description of every tensor from every rank."""
    num_gathers = 0
    gather = validation.torch.distributed.all_gather_object

    def count_and_gather(*arguments: Any, **options: Any) -> None:
        nonlocal num_gathers
        names = {sys._getframe(depth).f_code.co_name for depth in range(1, 4)}
        num_gathers += "determine_global_metadata" in names
        gather(*arguments, **options)

    monkeypatch.setattr(validation.torch.distributed, "all_gather_object", count_and_gather)
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoints = CheckpointWriter(worker, store, nbytes=0, keep=3)
    assert checkpoints.save(Checkpoint(1, b"{}")).problem == ""
    assert num_gathers > 0
    num_gathers = 0
    assert checkpoints.save(Checkpoint(2, b"{}")).problem == ""
    load_tensors(worker.policy.models, worker.optimizer, store.path(2), optimizer_steps=0)
    assert num_gathers == 0


def test_checkpoint_of_another_model_is_refused_by_name(
    worker: Any, megatron: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert (
        CheckpointWriter(worker, store, nbytes=0, keep=2).save(Checkpoint(1, b"{}")).problem == ""
    )
    resume_point = ResumePoint(store.path(1), make_state(1))
    shape = replace(read_shape(TWO_DIGIT_ADDITION), moe_ffn_hidden_size=48)
    settings = ModelSettings(path=str(TWO_DIGIT_ADDITION))
    models = wrap_data_parallel(build_models(shape, settings, ParallelSettings()))
    other_worker: Any = SimpleNamespace(
        layout=megatron,
        policy=SimpleNamespace(models=models),
        optimizer=DistributedAdam(models, ADAM, total_steps=9),
    )
    message = rf"{store.path(1)} cannot be loaded: .*experts.*run\.resume"
    with pytest.raises(CheckpointUnusable, match=message) as refusal:
        resume_point.load(other_worker)
    assert refusal.value.exit_code == ExitCode.BAD_DATA
    assert "Traceback" not in str(refusal.value)
    # The groups of this process exist already.
    monkeypatch.setattr("megatron_rl.run.modes.evaluate.parallel.initialize", lambda *_, **__: None)
    configuration = compose(["experiment=smoke", "mode=eval"])
    with pytest.raises(CheckpointUnusable, match=message):
        list(checkpoint_weights(configuration, shape, store.path(1), megatron)())
    (store.path(1) / "metadata.json").unlink()
    with pytest.raises(
        CheckpointUnusable, match=r"cannot be loaded: .*is not a distributed checkpoint"
    ):
        resume_point.load(worker)


def test_background_save_is_independent_of_further_training(worker: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    group = worker.layout.control_group
    checkpoints = CheckpointWriter(worker, store, nbytes=0, keep=2, background=group)
    before = {name: weight.clone() for name, weight in worker.policy.models[0].named_parameters()}
    assert checkpoints.save(Checkpoint(3, b"{}", background=True)) is None
    with torch.no_grad():
        for weight in worker.policy.models[0].parameters():
            weight.add_(1.0)
    assert checkpoints.wait_for_save(WaitForSave()) == SaveResult(
        3, nbytes=read_manifest(store.path(3)).nbytes
    )
    assert is_complete(store.path(3)) and checkpoints.wait_for_save(WaitForSave()) is None
    load_tensors(worker.policy.models, worker.optimizer, store.path(3), optimizer_steps=0)
    assert all(
        weight.equal(before[name]) for name, weight in worker.policy.models[0].named_parameters()
    )


@pytest.mark.parametrize("copy", [False, True])
def test_save_takes_the_memory_that_preflight_expects(worker: Any, copy: bool) -> None:
    # Bytes of each storage by its address.
    optimizer: dict[int, int] = {}
    model: dict[int, int] = {}
    for name, value in gather_tensors(worker.policy.models, worker.optimizer, copy=copy).items():
        sizes = optimizer if name.startswith("optimizer.") else model
        for tensor in local_tensors(value):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    parameters = sum(weight.numel() for weight in worker.policy.models[0].parameters())
    # Bytes for each parameter. Padding adds some.
    assert sum(optimizer.values()) / parameters == pytest.approx(12, rel=0.01)
    assert sum(model.values()) / parameters == pytest.approx(4, rel=0.01)


def local_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a value of `gather_tensors` keeps in memory."""
    if isinstance(value, CheckpointableShardedTensor):
        return [value._sh_ten.data]
    return [shard.tensor for shard in value.local_shards()]
