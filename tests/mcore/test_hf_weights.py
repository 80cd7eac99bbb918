"""Loading and saving of Hugging Face checkpoints on one rank."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from tests.support.failures import fails
from tests.support.packed_sequences import pack, sequence


def build(checkpoint: Path, *, load: bool = True, **settings: Any) -> tuple[list[Any], Any]:
    from megatron_rl.mcore.model import build_models
    from megatron_rl.mcore.weights import load_hf_weights

    shape = read_shape(checkpoint)
    models = build_models(
        shape, ModelSettings(path=str(checkpoint), **settings), ParallelSettings()
    )
    if load:
        load_hf_weights(models, shape, checkpoint)
    return models, shape


def logits_of(models: list[Any], indices: list[int]) -> torch.Tensor:
    batch = pack(indices)
    with torch.no_grad():
        return models[0](
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed_seq_params(),
        )[0]


@pytest.mark.slow
def test_packed_logits_match_transformers(megatron: Any, hf_model: Any, checkpoint: Path) -> None:
    indices = list(range(12))
    with torch.no_grad():
        hf_logits = torch.cat([hf_model(input_ids=sequence(i)[None]).logits[0] for i in indices])
    logits = logits_of(build(checkpoint)[0], indices)
    assert hf_logits.abs().max() > 1
    torch.testing.assert_close(logits, hf_logits, rtol=0, atol=2e-5)


def test_load_then_export_is_bit_exact(megatron: Any, checkpoint: Path) -> None:
    from megatron_rl.mcore.weights import iterate_hf_weights

    models, shape = build(checkpoint)
    original = load_file(checkpoint / "model.safetensors")
    export = {name: tensor.clone() for name, tensor in iterate_hf_weights(models, shape)}
    assert export.keys() == original.keys()
    assert all(torch.equal(export[name], original[name]) for name in original)


def test_saved_checkpoint_loads_in_transformers(
    megatron: Any, hf_model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    from megatron_rl.mcore.weights import save_hf_weights

    models, shape = build(checkpoint)
    target = tmp_path / "saved"
    save_hf_weights(models, shape, source=checkpoint, target=target, dtype=torch.float32)
    hf_export = type(hf_model).from_pretrained(target)
    for name, weight in hf_model.state_dict().items():
        assert torch.equal(hf_export.state_dict()[name], weight), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]


def test_ranks_wait_for_the_writers_in_a_group_of_their_own(
    megatron: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing may take longer than the limits of the other groups, which their barriers keep."""
    from megatron_rl.mcore.weights import save

    models, shape = build(checkpoint)
    new_group = torch.distributed.new_group
    wait = torch.distributed.monitored_barrier
    groups = []
    waits = []

    def make_group(*, backend: str, timeout: datetime.timedelta) -> Any:
        assert backend == "gloo" and timeout >= datetime.timedelta(hours=1)
        groups.append(new_group(backend=backend, timeout=timeout))
        return groups[-1]

    def record(group: Any, timeout: datetime.timedelta) -> None:
        waits.append(group)
        wait(group, timeout)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a barrier with the limit of the model's collectives")

    monkeypatch.setattr(save.dist, "new_group", make_group)
    monkeypatch.setattr(save.dist, "monitored_barrier", record)
    monkeypatch.setattr(save.dist, "barrier", refuse)
    target = tmp_path / "saved"
    save.save_hf_weights(models, shape, source=checkpoint, target=target, dtype=torch.float32)
    assert waits == groups * 3


def test_export_of_a_model_from_scratch_computes_the_same_logits(
    megatron: Any, hf_model: Any, checkpoint: Path, tmp_path: Path
) -> None:
    from megatron_rl.mcore.weights import save_hf_weights

    models, shape = build(checkpoint, load=False)
    save_hf_weights(
        models, shape, source=checkpoint, target=tmp_path / "scratch", dtype=torch.float32
    )
    hf_export = type(hf_model).from_pretrained(tmp_path / "scratch").float().eval()
    with torch.no_grad():
        hf_logits = hf_export(input_ids=sequence(0)[None]).logits[0]
    torch.testing.assert_close(logits_of(models, [0]), hf_logits, rtol=0, atol=1e-5)


# Name of a tensor, change of it (None removes it), and words of the error.
INVALID_TENSORS: list[tuple[str, Any, str]] = [
    (
        "model.layers.2.mlp.experts.5.up_proj.weight",
        lambda t: None,
        "model.layers.2.mlp.experts.5.up_proj.weight",
    ),
    (
        "model.layers.0.mlp.gate.weight",
        lambda t: t[:-1].clone(),
        "model.layers.0.mlp.gate.weight",
    ),
    ("model.layers.0.self_attn.k_proj.weight", lambda t: t[:-16].clone(), "k_proj"),
    ("model.embed_tokens.weight", lambda t: t[:-3].clone(), "model.embed_tokens.weight"),
    ("lm_head.weight", lambda t: torch.cat([t, t[:1]]), "lm_head.weight"),
    ("lm_head.weight", lambda t: t[0].clone(), "lm_head.weight has the shape"),
    ("model.norm.weight", lambda t: t.sum(), "model.norm.weight has the shape"),
    (
        "model.layers.0.self_attn.v_proj.weight",
        lambda t: t[:, 1:].clone(),
        "v_proj.weight has 32 rows and 31 columns",
    ),
    (
        "model.layers.0.mlp.experts.3.up_proj.weight",
        lambda t: t[1:].clone(),
        "up_proj.weight has 23 rows",
    ),
    (
        "model.layers.1.mlp.gate_proj.weight",
        lambda t: t[1:].clone(),
        "gate_proj.weight has 47 rows",
    ),
    (
        "model.norm.weight",
        lambda t: (-t.abs()).sqrt(),
        "model.norm.weight of model.safetensors holds NaN or Inf",
    ),
    (
        "lm_head.weight",
        lambda t: t / 0.0,
        "lm_head.weight of model.safetensors holds NaN or Inf",
    ),
    (
        "lm_head.weight",
        lambda t: t.abs() / -0.0,
        "lm_head.weight of model.safetensors holds NaN or Inf",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), INVALID_TENSORS)
def test_missing_misshapen_and_non_finite_tensors_are_refused_by_name(
    megatron: Any, checkpoint: Path, tmp_path: Path, name: str, change: Any, message: str
) -> None:

    shutil.copytree(checkpoint, tmp_path / "bad")
    tensors = load_file(checkpoint / "model.safetensors")
    tensor = change(tensors.pop(name))
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with fails(ExitCode.BAD_DATA, match=message) as refusal:
        build(tmp_path / "bad")
    assert refusal.value.exit_code is ExitCode.BAD_DATA


def test_quantized_tensors_are_refused(megatron: Any, checkpoint: Path, tmp_path: Path) -> None:
    """An FP8 tensor without its scales would otherwise be copied as if it were a weight."""

    shutil.copytree(checkpoint, tmp_path / "fp8")
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    with fails(ExitCode.BAD_DATA, match=rf"{name} is torch\.float8_e4m3fn.*bf16 checkpoint"):
        build(tmp_path / "fp8")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"model\.safetensors has \d+ bytes"),
        ("{", r"model\.safetensors\.index\.json is not JSON"),
        (
            {"weight_map": {"model.embed_tokens.weight": "absent.safetensors"}},
            r"absent\.safetensors cannot be read",
        ),
        (
            {"weight_map": {"model.embed_tokens.weight": "other.safetensors"}},
            "embed_tokens.weight of other.safetensors",
        ),
    ],
)
def test_damaged_files_are_refused_by_name(
    megatron: Any,
    checkpoint: Path,
    tmp_path: Path,
    index: str | dict[str, Any] | None,
    message: str,
) -> None:

    shutil.copy(checkpoint / "config.json", tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    if index is None:
        (tmp_path / "model.safetensors").write_bytes(
            (checkpoint / "model.safetensors").read_bytes()[:-100]
        )
    else:
        text = index if isinstance(index, str) else json.dumps(index)
        (tmp_path / "model.safetensors.index.json").write_text(text)
    with fails(ExitCode.BAD_DATA, match=message):
        build(tmp_path)


def test_sharded_checkpoint_is_read_through_its_index(
    megatron: Any, checkpoint: Path, tmp_path: Path
) -> None:
    from megatron_rl.mcore.weights import iterate_hf_weights

    original = load_file(checkpoint / "model.safetensors")
    names = sorted(original)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({n: original[n] for n in members}, tmp_path / file, metadata={"format": "pt"})
    index = {"weight_map": {n: file for file, members in halves.items() for n in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(checkpoint / "config.json", tmp_path)
    models, shape = build(tmp_path)
    assert all(torch.equal(t, original[n]) for n, t in iterate_hf_weights(models, shape))
