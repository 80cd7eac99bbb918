"""Refusals of checkpoints before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import MakeCheckpoint, configuration_of


def refusal_of(path: Path) -> str:
    """The text of the only refusal of a checkpoint."""
    with pytest.raises(ConfigurationRefused) as error:
        configuration_of([f"model.path={path}"])
    (refusal,) = error.value.refusals
    text = str(refusal)
    assert text.startswith(f"model.path={path}: ")
    return text


def test_a_missing_directory_or_file_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refusal_of(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "It is a file" in refusal_of(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "config.json does not exist" in refusal_of(tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"architectures": ["GptOssForCausalLM"]}, "not supported"),
        ({"eos_token_id": None}, "no response would end"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
        ({"num_experts_per_tok": 9}, "exceeds num_experts=8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "use the bf16 checkpoint"),
        ({"vocab_size": 40}, "They belong to different models"),
        ({"eos_token_id": 7}, "They belong to different models"),
    ],
)
def test_an_unusable_shape_or_tokenizer_is_refused(
    make_checkpoint: MakeCheckpoint, changes: dict[str, Any], rule: str
) -> None:
    assert rule in refusal_of(make_checkpoint(**changes))


def test_a_broken_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read" in refusal_of(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal_of(checkpoint)


def test_missing_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal_of(checkpoint)
    assert (
        configuration_of([f"model.path={checkpoint}", "model.init=random"]).model.init == "random"
    )


def shard(path: Path, *names: str, cut: int = 0) -> None:
    """A safetensors file of one-element float32 tensors, without its last `cut` bytes."""
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    } | {"__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4 * len(names))
    path.write_bytes(content[: len(content) - cut])


def test_complete_weights_are_accepted(checkpoint: Path) -> None:
    shard(checkpoint / "model.safetensors", "a", "b")
    assert configuration_of([f"model.path={checkpoint}"]).model.path == str(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    shard(checkpoint / "1.safetensors", "a")
    shard(checkpoint / "2.safetensors", "b", "c")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert configuration_of([f"model.path={checkpoint}"]).model.path == str(checkpoint)


@pytest.mark.parametrize("cut", [1, 5, 9, 10_000])
def test_truncated_weights_are_refused(checkpoint: Path, cut: int) -> None:
    shard(checkpoint / "model.safetensors", "a", "b", cut=cut)
    text = refusal_of(checkpoint)
    assert "model.safetensors" in text
    assert "Copy or download it again" in text


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "no safetensors header"),
        ((4).to_bytes(8, "little") + b"nope", "no safetensors header"),
        ((2).to_bytes(8, "little") + b"[]", "no safetensors header"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "no safetensors header"),
        ((28).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,-1]}}', "no safetensors header"),
        ((2).to_bytes(8, "little") + b"{}more", "14 bytes"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "no safetensors header"),
    ],
)
def test_files_that_are_not_safetensors_are_refused(
    checkpoint: Path, content: bytes, rule: str
) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    assert rule in refusal_of(checkpoint)


@pytest.mark.parametrize(
    ("index", "rule"),
    [
        ("{", "index.json is not JSON"),
        ("[" * 100_000, "index.json is not JSON"),
        ("{}", "weight_map"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 5}}', "weight_map"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors"),
        (
            '{"weight_map": {"a": "1.safetensors", "z": "1.safetensors"}}',
            "1.safetensors does not hold z",
        ),
    ],
)
def test_a_broken_index_is_refused(checkpoint: Path, index: str, rule: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    shard(checkpoint / "1.safetensors", "a")
    (checkpoint / "model.safetensors.index.json").write_text(index)
    assert rule in refusal_of(checkpoint)


def test_a_config_json_that_is_not_json_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    assert "is not JSON" in refusal_of(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps([1]))
    assert "not a JSON object" in refusal_of(checkpoint)
