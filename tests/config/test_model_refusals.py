"""Checkpoints that must be refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.compose import compose
from megatron_rl.config.refusal import ConfigurationRefused
from tests.config.conftest import MakeCheckpoint


def refusal_of(path: Path) -> str:
    with pytest.raises(ConfigurationRefused) as refused:
        compose([f"model.path={path}"])
    (refusal,) = refused.value.refusals
    text = str(refusal)
    assert text.startswith(f"model.path={path}: ")
    return text


def test_missing_directory_and_file(tmp_path: Path) -> None:
    assert "no such directory" in refusal_of(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "It is a file" in refusal_of(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "config.json does not exist" in refusal_of(tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_experts": None}, "only Mixture-of-Experts models"),
        ({"architectures": ["MixtralForCausalLM"]}, "not supported"),
        ({"eos_token_id": None}, "no response would ever end"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "not an MoE model"),
        ({"num_experts_per_tok": 9}, "exceeds num_experts=8"),
        ({"vocab_size": 40}, "They belong to different models"),
        ({"eos_token_id": 7}, "They belong to different models"),
    ],
)
def test_unusable_shape_or_tokenizer(make_checkpoint: MakeCheckpoint, changes: dict[str, Any], rule: str) -> None:
    assert rule in refusal_of(make_checkpoint(**changes))


def test_broken_files(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read" in refusal_of(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal_of(checkpoint)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal_of(checkpoint)


def test_config_json_is_not_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    assert "is not JSON" in refusal_of(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps([1]))
    assert "not a JSON object" in refusal_of(checkpoint)
