"""Checkpoints of one rank: complete or absent after disk errors, and read without trusting them."""

import os
import pickle
import subprocess
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.contracts.exit_codes import Failure
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

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.commands import Checkpoint, WaitForSave
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.mcore.checkpoint import (
    SavedWeights,
    gather_tensors,
    load_tensors,
    tensors,
    write_tensors,
)
from megatron_rl.mcore.checkpoint.tensor_reader import TensorReader
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.weights.export import iterate_hf_weights
from megatron_rl.models.families import read_shape
from megatron_rl.run.checkpoints import saving
from megatron_rl.run.checkpoints.disk_space import checkpoint_bytes
from megatron_rl.run.checkpoints.manifest import changed_files, read_manifest
from megatron_rl.run.checkpoints.resume import ResumePoint
from megatron_rl.run.checkpoints.saving import CheckpointWriter, SaveResult
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.modes.evaluate import checkpoint_weights
from tests.support.checkpoints import make_state
from tests.support.configurations import configuration_of
from tests.support.disk_log import DiskLog
from tests.support.policies import ADAM, TWO_DIGIT_ADDITION, make_policy

# Cases of `test_a_checkpoint_loads_in_place_over_nan_bit_for_bit`
DAILY = (("float32", 0), ("bfloat16", 3))


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


@pytest.mark.slow
def test_full_disk_is_reported_and_keeps_the_previous_checkpoint(worker: Any, disk: Path) -> None:
    checkpoints = CheckpointWriter(worker, CheckpointStore(disk / "checkpoints"), nbytes=0, keep=2)
    assert checkpoints.save(Checkpoint(1, b"{}")).problem == ""
    outcome = checkpoints.save(Checkpoint(2, b"{}"))
    assert "disk is full" in outcome.problem
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["iter_0000001"]
    assert is_complete(disk / "checkpoints/iter_0000001")


@pytest.mark.slow
def test_free_space_is_checked_before_anything_is_written(worker: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    outcome = CheckpointWriter(worker, store, nbytes=2**60, keep=2).save(Checkpoint(1, b"{}"))
    assert "MiB are free, and a checkpoint takes 1,099,511,627,776 MiB" in outcome.problem
    assert list(store.folder.iterdir()) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_background_saves_use_the_gpu_of_their_rank(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread has GPU 0, and torch's writer would make every rank allocate memory on it."""
    devices = []

    def record_device(device: torch.device) -> None:
        devices.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", record_device)
    layout = replace(worker.layout, device=torch.device("cuda", 3))
    gpu_worker: Any = SimpleNamespace(
        layout=layout, policy=worker.policy, optimizer=worker.optimizer
    )
    store = CheckpointStore(tmp_path / "checkpoints")
    writer = CheckpointWriter(gpu_worker, store, nbytes=0, keep=2, background=layout.control_group)
    assert writer.save(Checkpoint(1, b"{}", background=True)) is None
    outcome = writer.wait_for_save(WaitForSave())
    assert outcome is not None and outcome.problem == ""
    assert devices == [("checkpoint_0", torch.device("cuda", 3))]


@pytest.mark.slow
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


def random_models(seed: int, dtype: str) -> tuple[Any, DistributedAdam]:
    torch.manual_seed(seed)
    _, policy = make_policy(TWO_DIGIT_ADDITION, ParallelSettings(), GrpoSettings(), dtype=dtype)
    return policy.models, DistributedAdam(policy.models, ADAM, total_steps=9)


def step(models: Any, optimizer: DistributedAdam, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    for parameter in models[0].parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    assert optimizer.step(loss_is_finite=True).is_applied


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_step_after_a_resume_is_bit_exact(megatron: Any, tmp_path: Path, dtype: str) -> None:
    models, optimizer = random_models(1, dtype)
    step(models, optimizer, 1)
    write_tensors(gather_tensors(models, optimizer), tmp_path, dist.group.WORLD)
    saved_weights = {name: weight.clone() for name, weight in models[0].named_parameters()}
    step(models, optimizer, 2)
    resumed_models, resumed_optimizer = random_models(2, dtype)
    load_tensors(resumed_models, resumed_optimizer, tmp_path, optimizer_steps=1)
    for name, weight in resumed_models[0].named_parameters():
        assert weight.equal(saved_weights[name]), f"{name}, which engines are sent first"
    step(resumed_models, resumed_optimizer, 2)
    weights = dict(models[0].named_parameters())
    for name, weight in resumed_models[0].named_parameters():
        assert weight.dtype == getattr(torch, dtype) and weight.equal(weights[name]), name


def moments(optimizer: DistributedAdam) -> list[torch.Tensor]:
    """All float32 weights and moments of the optimizer."""
    tensors = []
    for inner in optimizer.scheduler.optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            for param in group["params"]:
                tensors += [param.detach(), *inner.optimizer.state[param].values()]
    return tensors


def copy_state(models: Any, optimizer: DistributedAdam) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*models[0].parameters(), *moments(optimizer))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_steps"),
    [
        pytest.param(
            dtype,
            num_steps,
            marks=() if (dtype, num_steps) in DAILY else pytest.mark.nightly,
        )
        for dtype in ("float32", "bfloat16")
        for num_steps in (0, 1, 3)
    ],
)
def test_a_checkpoint_loads_in_place_over_nan_bit_for_bit(
    megatron: Any, tmp_path: Path, dtype: str, num_steps: int
) -> None:
    """The weights, the optimizer's state and the next step continue the checkpoint.

    The learning rate belongs to the step, with the peak that was set since.
    """
    models, optimizer = random_models(1, dtype)
    for seed in range(num_steps):
        step(models, optimizer, seed)
    write_tensors(gather_tensors(models, optimizer), tmp_path, dist.group.WORLD)
    saved_tensors = copy_state(models, optimizer)
    optimizer.set_peak_lr(0.02)
    step(models, optimizer, 7)
    next_tensors = copy_state(models, optimizer)
    step(models, optimizer, 8)
    for tensor in (*models[0].parameters(), *moments(optimizer)):
        tensor.data.fill_(float("nan"))
    load_tensors(models, optimizer, tmp_path, optimizer_steps=num_steps)
    assert optimizer.steps == num_steps
    assert all(map(torch.equal, copy_state(models, optimizer), saved_tensors))
    step(models, optimizer, 7)
    assert all(map(torch.equal, copy_state(models, optimizer), next_tensors))


@pytest.mark.slow
def test_reading_a_checkpoint_warns_of_nothing_that_needs_no_action(
    worker: Any, tmp_path: Path
) -> None:
    """Every rank would print these warnings at every resume."""
    models = worker.policy.models
    write_tensors(gather_tensors(models, worker.optimizer), tmp_path, dist.group.WORLD)
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        compat.install()
        load_tensors(models, worker.optimizer, tmp_path, optimizer_steps=0)
    assert [str(message.message) for message in messages] == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_places_of_tensors_are_checked_in_the_first_save_alone(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check gathers the description of every tensor from every rank."""
    num_gathers = 0
    gather = validation.torch.distributed.all_gather_object

    def count_and_gather(*arguments: Any, **options: Any) -> None:
        nonlocal num_gathers
        names = {frame.name for frame in traceback.extract_stack(limit=4)}
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


@pytest.mark.slow
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
    with pytest.raises(Failure, match=message) as refusal:
        resume_point.load(other_worker)
    assert refusal.value.exit_code == ExitCode.BAD_DATA
    assert "Traceback" not in str(refusal.value)
    # The groups of this process exist already.
    monkeypatch.setattr("megatron_rl.run.modes.evaluate.parallel.initialize", lambda *_, **__: None)
    configuration = configuration_of(["experiment=smoke", "mode=eval"])
    with pytest.raises(Failure, match=message):
        list(checkpoint_weights(configuration, shape, store.path(1), megatron)().stream_all())
    (store.path(1) / "metadata.json").unlink()
    with pytest.raises(Failure, match=r"cannot be loaded: .*is not a distributed checkpoint"):
        resume_point.load(worker)


@pytest.mark.slow
def test_weights_that_megatron_leaves_out_or_adds_are_refused(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = worker.policy.models
    write_tensors(gather_tensors(models, worker.optimizer), tmp_path, dist.group.WORLD)
    load = tensors.dist_checkpointing.load
    lost_name, _ = next(models[0].module.named_parameters())

    def load_others(*arguments: Any, **options: Any) -> Any:
        state = load(*arguments, **options)
        state["model0"]["scale"] = state["model0"].pop(lost_name)
        return state

    monkeypatch.setattr(tensors.dist_checkpointing, "load", load_others)
    with pytest.raises(ValueError, match=rf"it lacks \['{lost_name}'\] and has \['scale'\]"):
        load_tensors(models, worker.optimizer, tmp_path, optimizer_steps=0)


@pytest.mark.slow
def test_background_save_is_independent_of_further_training(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_weights_changed = threading.Event()

    def write_later(*arguments: Any) -> None:
        assert are_weights_changed.wait(10)
        write_tensors(*arguments)

    monkeypatch.setattr(saving, "write_tensors", write_later)
    models = worker.policy.models
    store = CheckpointStore(tmp_path / "checkpoints")
    group = worker.layout.control_group
    checkpoints = CheckpointWriter(worker, store, nbytes=0, keep=2, background=group)
    before = copy_weights(models)
    assert checkpoints.save(Checkpoint(3, b"{}", background=True)) is None
    with torch.no_grad():
        for weight in models[0].parameters():
            weight.add_(1.0)
    are_weights_changed.set()
    assert checkpoints.wait_for_save(WaitForSave()) == SaveResult(
        3, nbytes=read_manifest(store.path(3)).nbytes
    )
    assert is_complete(store.path(3)) and checkpoints.wait_for_save(WaitForSave()) is None
    load_tensors(models, worker.optimizer, store.path(3), optimizer_steps=0)
    # The optimizer has copies of the weights, which `load_tensors` prefers
    for weights in (copy_weights(models), read_weights(store.path(3))):
        assert all(weights[name].equal(tensor) for name, tensor in before.items())


def copy_weights(models: Any) -> dict[str, torch.Tensor]:
    """Copy the weights by their Hugging Face names."""
    weights = iterate_hf_weights(models, read_shape(TWO_DIGIT_ADDITION))
    return {name: tensor.clone() for name, tensor in weights}


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint, without those in the optimizer's state."""
    model = ModelSettings(path=str(TWO_DIGIT_ADDITION))
    shape = read_shape(TWO_DIGIT_ADDITION)
    return dict(SavedWeights(checkpoint, shape, model, bucket_bytes=2**30).all(torch.float32))


@pytest.mark.slow
def test_tensors_are_on_the_disk_when_they_are_written(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DiskLog(monkeypatch)
    group = worker.layout.control_group
    write_tensors(gather_tensors(worker.policy.models, worker.optimizer), tmp_path, group)
    files = [*tmp_path.glob("*.distcp")]
    assert files and all(log.is_in_order(("sync", file)) for file in files)


def test_rank_0_alone_writes_the_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        directory = tmp_path / str(rank)
        directory.mkdir()
        monkeypatch.setattr(tensors, "write_state", lambda *_: None)
        monkeypatch.setattr(tensors.dist, "get_rank", lambda rank=rank: rank)
        write_tensors({}, directory, dist.group.WORLD)
    assert (tmp_path / "0/common.pt").exists() and not [*(tmp_path / "1").iterdir()]


@pytest.mark.slow
def test_a_checkpoint_is_as_large_as_the_free_space_that_it_requires(
    worker: Any, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    result = CheckpointWriter(worker, store, nbytes=0, keep=1).save(Checkpoint(1, b"{}"))
    c = configuration_of(
        ["experiment=smoke", f"model.path={TWO_DIGIT_ADDITION}", "model.dtype=float32"]
    )
    expected_bytes = checkpoint_bytes(c, read_shape(TWO_DIGIT_ADDITION))
    # A small part does not grow with the model: random numbers, metadata
    assert result is not None and 0 <= result.nbytes - expected_bytes < 2**20


@pytest.mark.slow
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
