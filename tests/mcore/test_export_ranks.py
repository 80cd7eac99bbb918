"""The tensors that one rank of many exports and writes, with groups that are only names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.mcore.weights import export, save
from megatron_rl.mcore.weights.parameters import PlacedParameter
from megatron_rl.models.families import parameter_names, read_shape
from tests.support.policies import TWO_DIGIT_ADDITION

SHAPE = read_shape(TWO_DIGIT_ADDITION)
EMBEDDING = PlacedParameter(
    name="embedding.word_embeddings.weight",
    weight=torch.ones(SHAPE.vocab_size + 3, SHAPE.hidden_size),
    names=parameter_names(SHAPE),
    layer_offset=0,
    experts_per_rank=SHAPE.num_experts,
    is_tied_copy=False,
    is_frozen=False,
)
EXPERT = dataclasses.replace(
    EMBEDDING,
    name="decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
    weight=torch.ones(SHAPE.hidden_size, SHAPE.moe_ffn_hidden_size),
)


def test_rows_that_pad_the_vocabulary_are_not_exported() -> None:
    ((name, tensor),) = export.hf_tensors(EMBEDDING, 0, EMBEDDING.weight, SHAPE, None)
    assert name == "model.embed_tokens.weight"
    assert tensor.shape == (SHAPE.vocab_size, SHAPE.hidden_size)


@pytest.mark.parametrize(("is_frozen", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_frozen_weights_keep_their_dtype(is_frozen: bool, dtype: torch.dtype) -> None:
    parameter = dataclasses.replace(EMBEDDING, is_frozen=is_frozen)
    ((_, tensor),) = export.hf_tensors(parameter, 0, parameter.weight, SHAPE, torch.bfloat16)
    assert tensor.dtype == dtype


@pytest.fixture
def gather_groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups over which weights are gathered, in order. Each rank of them has the same."""
    groups: list[str] = []

    def gather(weights: list[torch.Tensor], weight: torch.Tensor, group: Any) -> None:
        groups.append(group)
        for copy in weights:
            copy.copy_(weight)

    monkeypatch.setattr(export.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(export.dist, "all_gather", gather)
    for name in ("expert_tensor_parallel", "tensor_model_parallel", "expert_model_parallel"):
        monkeypatch.setattr(export.parallel_state, f"get_{name}_group", lambda name=name: name)
    return groups


def export_names(monkeypatch: pytest.MonkeyPatch, *parameters: PlacedParameter) -> list[str]:
    monkeypatch.setattr(export, "placed_parameters", lambda *_: iter(parameters))
    return [name for name, _ in export.iterate_hf_weights([], SHAPE)]


def test_experts_are_gathered_over_their_own_groups(
    monkeypatch: pytest.MonkeyPatch, gather_groups: list[str]
) -> None:
    export_names(monkeypatch, EMBEDDING)
    assert gather_groups == ["tensor_model_parallel"]
    gather_groups.clear()
    export_names(monkeypatch, EXPERT)
    assert gather_groups == ["expert_tensor_parallel", "expert_model_parallel"]


def test_tied_embeddings_are_exported_once(
    monkeypatch: pytest.MonkeyPatch, gather_groups: list[str]
) -> None:
    copy = dataclasses.replace(EMBEDDING, name="output_layer.weight", is_tied_copy=True)
    assert export_names(monkeypatch, EMBEDDING, copy) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("replica", "tensor_rank", "stage", "files"),
    [
        (0, 0, 0, ["model-stage000"]),
        (0, 0, 2, ["model-stage002"]),
        (1, 0, 0, []),
        (0, 1, 0, []),
    ],
)
def test_one_rank_of_each_pipeline_stage_writes(
    megatron: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replica: int,
    tensor_rank: int,
    stage: int,
    files: list[str],
) -> None:
    state = save.parallel_state
    monkeypatch.setattr(state, "get_data_parallel_rank", lambda **_: replica)
    monkeypatch.setattr(state, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda: stage)
    names: list[str] = []

    class Writer:
        def __init__(self, target: Path, name: str, shard_bytes: int) -> None:
            names.append(name)

        def add(self, name: str, tensor: torch.Tensor) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(save, "ShardWriter", Writer)
    monkeypatch.setattr(save, "begin_checkpoint", lambda target: None)
    monkeypatch.setattr(save, "commit_checkpoint", lambda target, **_: None)
    monkeypatch.setattr(save, "iterate_hf_weights", lambda *_: iter([("a", torch.ones(1))]))
    save.save_hf_weights([], SHAPE, source=tmp_path, target=tmp_path / "out", dtype=torch.float32)
    assert names == files
