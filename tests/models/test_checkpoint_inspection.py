"""Inspection of start checkpoints: shape, weight files and tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models.hf_checkpoint.inspection import inspect_checkpoint
from megatron_rl.models.hf_checkpoint.weight_files import (
    DamagedWeights,
    check_weight_files,
    weight_map,
)
from tests.support.character_tokenizer import write_character_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 48,
    "eos_token_id": 1,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a directory with everything but weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_character_tokenizer(tmp_path)
    return tmp_path


def write_weights(path: Path, *names: str, cut: int = 0) -> None:
    """Write a safetensors file of one-element float32 tensors, without its last `cut` bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for i, name in enumerate(names):
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4 * len(names))
    path.write_bytes(content[: len(content) - cut])


def test_complete_checkpoint_has_no_defects(checkpoint: Path) -> None:
    write_weights(checkpoint / "model.safetensors", "a", "b")
    shape, defects = inspect_checkpoint(str(checkpoint))
    assert defects == []
    assert shape is not None and shape.num_experts == 8


def test_random_weights_require_no_weight_files(checkpoint: Path) -> None:
    _, (defect,) = inspect_checkpoint(str(checkpoint))
    assert "no model.safetensors" in defect.rule
    assert "save_pretrained" in defect.remedy
    assert inspect_checkpoint(str(checkpoint), weights=False)[1] == []


def test_weights_and_tokenizer_are_both_reported(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    shape, defects = inspect_checkpoint(str(checkpoint))
    assert shape is not None
    weights, tokenizer = defects
    assert "safetensors" in weights.rule
    assert "tokenizer.json" in tokenizer.rule


def test_missing_directory_and_unsupported_model(checkpoint: Path) -> None:
    shape, (defect,) = inspect_checkpoint(str(checkpoint / "nowhere"))
    assert shape is None
    assert defect.rule == "There is no such directory"
    assert "local directory" in defect.remedy
    assert "not a directory" in inspect_checkpoint(str(checkpoint / "config.json"))[1][0].rule
    (checkpoint / "config.json").write_text("{}")
    assert "not supported" in inspect_checkpoint(str(checkpoint))[1][0].rule


@pytest.mark.parametrize("cut", [1, 5, 9, 10_000])
def test_truncated_weights(tmp_path: Path, cut: int) -> None:
    write_weights(tmp_path / "model.safetensors", "a", "b", cut=cut)
    with pytest.raises(DamagedWeights, match=r"model\.safetensors has "):
        check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        (b"nope", "no safetensors header"),
        (b"[]", "no safetensors header"),
        (b'{"a":1}', "no safetensors header"),
        (b'{"a":{}}', "no safetensors header"),
        (b'{"a":{"data_offsets":[0,-1]}}', "no safetensors header"),
        (b'{"a":{"data_offsets":[4,0]}}', "no safetensors header"),
        (b'{"a":{"data_offsets":[0,4]}}', "has 36 bytes, and its header describes 40"),
        (b"[" * 100_000, "no safetensors header"),
    ],
)
def test_invalid_headers(tmp_path: Path, header: bytes, rule: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedWeights, match=rule):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_files_of_another_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedWeights, match="no safetensors header fits"):
        check_weight_files(tmp_path)


def test_index_lists_the_file_of_every_tensor(tmp_path: Path) -> None:
    write_weights(tmp_path / "1.safetensors", "a")
    write_weights(tmp_path / "2.safetensors", "b", "c")
    files = {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert weight_map(tmp_path) == files
    check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("index", "rule"),
    [
        ("{", "index.json is not JSON with a weight_map"),
        ("[" * 100_000, "index.json is not JSON with a weight_map"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 5}}', "weight_map"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors, which is missing"),
        (
            '{"weight_map": {"a": "1.safetensors", "z": "1.safetensors"}}',
            "1.safetensors does not hold z",
        ),
    ],
)
def test_invalid_index(tmp_path: Path, index: str, rule: str) -> None:
    write_weights(tmp_path / "1.safetensors", "a")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedWeights, match=rule):
        check_weight_files(tmp_path)
