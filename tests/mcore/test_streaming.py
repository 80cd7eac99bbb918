"""Exports of a checkpoint without the whole model in memory."""

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.schema import ModelSettings, OptimizerSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from tests.mcore.test_hf_weights import build
from tests.support.failures import fails
from tests.support.tiny_families import FAMILIES, randomize_weights
from tests.support.torchrun import torchrun

# Bytes. The largest parameter of the model has 6,400, and the whole model 250,000.
BUCKET = 30_000


@pytest.fixture(scope="module")
def run_checkpoint(
    megatron: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint that a run of one rank saved."""
    return save(build(checkpoint)[0], tmp_path_factory.mktemp("saved"))


def save(chunks: list[Any], directory: Path) -> Path:
    from megatron_rl.mcore.checkpoint import gather_tensors, write_tensors
    from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel

    models = wrap_data_parallel(chunks)
    adam = DistributedAdam(models, OptimizerSettings(), total_steps=1)
    write_tensors(gather_tensors(models, adam), directory, torch.distributed.group.WORLD)
    return directory


def open_weights(run_checkpoint: Path, checkpoint: Path, bucket_bytes: int = BUCKET) -> Any:
    from megatron_rl.mcore.checkpoint import SavedWeights

    model = ModelSettings(path=str(checkpoint))
    return SavedWeights(run_checkpoint, read_shape(checkpoint), model, bucket_bytes=bucket_bytes)


def live_bytes() -> int:
    """Return the bytes of all CPU tensors in memory, counting each storage once."""
    gc.collect()
    tensors = [
        t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu"
    ]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.slow
def test_export_is_bit_exact(
    run_checkpoint: Path, hf_model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    from megatron_rl.mcore.checkpoint import write_hf

    write_hf(
        open_weights(run_checkpoint, checkpoint),
        tmp_path / "out",
        source=checkpoint,
        dtype=torch.float32,
    )
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    original = load_file(checkpoint / "model.safetensors")
    assert index.keys() == original.keys() and len(set(index.values())) > 4
    for name, tensor in original.items():
        assert torch.equal(load_file(tmp_path / "out" / index[name])[name], tensor), name
    hf_export = type(hf_model).from_pretrained(tmp_path / "out")
    assert all(
        torch.equal(hf_export.state_dict()[name], weight)
        for name, weight in hf_model.state_dict().items()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_export_holds_one_bucket_at_a_time(
    run_checkpoint: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rl.mcore.checkpoint import streaming, write_hf

    weights = open_weights(run_checkpoint, checkpoint)
    parameters = [parameter for bucket in weights.buckets for parameter in bucket]
    nbytes = {
        name: parameter.weight.nbytes
        for parameter in parameters
        for name in parameter.layout(0).hf_names
    }
    gc.collect()
    gc.freeze()  # objects of other tests need not be searched for each tensor
    bytes_before = live_bytes()
    add = streaming.ShardWriter.add
    memory: list[int] = []
    excess: list[int] = []

    def add_and_measure(writer: Any, name: str, tensor: torch.Tensor) -> None:
        add(writer, name, tensor)
        memory.append(live_bytes() - bytes_before)
        excess.append(memory[-1] - BUCKET - 2 * nbytes[name])

    monkeypatch.setattr(streaming.ShardWriter, "add", add_and_measure)
    try:
        write_hf(weights, tmp_path / "out", source=checkpoint, dtype=torch.float32)
    finally:
        gc.unfreeze()
    assert max(excess) <= 0, "memory holds a parameter whole, in parts, and in the shard"
    assert max(memory) > BUCKET / 2, "the weights were counted"


@pytest.mark.distributed
def test_ranks_wait_for_a_slow_disk_beyond_the_limit_of_their_groups(tmp_path: Path) -> None:
    output = torchrun(Path(__file__).with_name("slow_commit.py"), str(tmp_path), ranks=2)
    assert {f"RESULT rank {rank}" for rank in range(2)} <= set(output.splitlines())


@pytest.mark.slow
def test_interrupted_export_leaves_nothing(
    run_checkpoint: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rl.mcore.checkpoint import streaming, write_hf

    def interrupt(writer: Any, name: str, tensor: torch.Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming.ShardWriter, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_hf(
            open_weights(run_checkpoint, checkpoint),
            tmp_path / "out",
            source=checkpoint,
            dtype=torch.float32,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_checkpoint_of_another_model_is_refused(
    run_checkpoint: Path, checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for change, message in (
        ({"intermediate_size": 64}, "has the shape"),
        ({"mlp_only_layers": []}, "it holds no"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=f"is of another model: .*{message}"):
            list(open_weights(run_checkpoint, tmp_path).all(torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("value", "dtype"), [(math.nan, torch.float32), (1e38, torch.float16)])
def test_export_of_nan_is_refused_and_leaves_nothing(
    megatron: Any, checkpoint: Path, tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    from megatron_rl.mcore.checkpoint import write_hf

    chunks, _ = build(checkpoint)
    chunks[0].decoder.final_layernorm.weight.data[3] = value
    (tmp_path / "saved").mkdir()
    weights = open_weights(save(chunks, tmp_path / "saved"), checkpoint)
    with fails(ExitCode.BAD_DATA, match=r"model\.norm\.weight holds NaN or Inf"):
        write_hf(weights, tmp_path / "out", source=checkpoint, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "deepseek_v3" else pytest.mark.nightly)
        for family in FAMILIES
    ],
)
def test_export_of_every_family_is_bit_exact(megatron: Any, tmp_path: Path, family: str) -> None:
    randomize_weights(FAMILIES[family]()).save_pretrained(tmp_path / "start")
    (tmp_path / "saved").mkdir()
    save(build(tmp_path / "start")[0], tmp_path / "saved")
    export = {
        name: tensor.clone()
        for name, tensor in open_weights(tmp_path / "saved", tmp_path / "start").all(torch.float32)
    }
    original = load_file(tmp_path / "start" / "model.safetensors")
    assert export.keys() == original.keys()
    different = [name for name, tensor in original.items() if not export[name].equal(tensor)]
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1, 5_000, BUCKET])
def test_buckets_are_filled_in_order(
    run_checkpoint: Path, checkpoint: Path, bucket_bytes: int
) -> None:
    """A bucket ends where the next parameter would exceed it. A larger one has its own."""
    (parameters,) = open_weights(run_checkpoint, checkpoint, 2**30).buckets
    buckets: list[list[str]] = []
    size = 0
    for parameter in parameters:
        size += parameter.weight.nbytes
        if not buckets or size > bucket_bytes:
            buckets.append([])
            size = parameter.weight.nbytes
        buckets[-1].append(parameter.name)
    assert len(buckets) > 1
    weights = open_weights(run_checkpoint, checkpoint, bucket_bytes)
    assert [[parameter.name for parameter in bucket] for bucket in weights.buckets] == buckets
