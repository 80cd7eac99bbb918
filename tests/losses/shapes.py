"""Model shapes with a given vocabulary."""

from dataclasses import replace
from pathlib import Path

from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape

ASSET = Path(__file__).parents[2] / "megatron_rl/models/assets/qwen3_moe_tiny_column_addition"


def shape_of(vocab_size: int) -> ModelShape:
    return replace(read_shape(ASSET), vocab_size=vocab_size)
