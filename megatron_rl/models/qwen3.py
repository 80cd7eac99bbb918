"""Qwen3 without experts: every layer has one MLP, so there are no routes to replay."""

from __future__ import annotations

from typing import Any

from megatron_rl.models.config_json import (
    DecoderConfig,
    common_shape,
    parse_config,
    refuse_unsupported,
)
from megatron_rl.models.names import ATTENTION, DENSE_MLP, LAYER_NORMS, QK_NORMS, Names
from megatron_rl.models.shape import ModelShape

ARCHITECTURE = "Qwen3ForCausalLM"
NAMES: Names = {**LAYER_NORMS, **ATTENTION, **QK_NORMS, **DENSE_MLP}


class _Config(DecoderConfig, kw_only=True):
    use_sliding_window: bool = False


def shape(raw: dict[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises ValueError naming key, value, rule and remedy.
    """
    # In transformers, the default of head_dim is 128 for this family, for any hidden size.
    config = parse_config({"head_dim": 128} | raw, _Config)
    refuse_unsupported(
        config, use_sliding_window=(config.use_sliding_window, "attention is full and causal")
    )
    return ModelShape(architecture=ARCHITECTURE, qk_norm=True, **common_shape(config))
