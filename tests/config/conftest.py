"""Checkpoints for the rules: a config.json, a tokenizer, and a weights file without tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.character_tokenizer import write_character_tokenizer
from tests.support.configurations import MakeCheckpoint

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 48,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """A function that writes a checkpoint.

    Its arguments change keys of config.json; None removes one.
    """

    def make(**changes: Any) -> Path:
        directory = tmp_path / "checkpoint"
        directory.mkdir(exist_ok=True)
        shape = {key: value for key, value in (SHAPE | changes).items() if value is not None}
        (directory / "config.json").write_text(json.dumps(shape))
        header_without_tensors = (2).to_bytes(8, "little") + b"{}"
        (directory / "model.safetensors").write_bytes(header_without_tensors)
        write_character_tokenizer(directory)
        return directory

    return make


@pytest.fixture
def checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint()
