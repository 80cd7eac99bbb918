"""Qwen3-MoE: its Hugging Face `config.json`, as transformers 4 or 5 writes it, becomes a `ModelShape`."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from megatron_rl.models.shape import ModelConfigError, ModelShape

_ARCHITECTURE = "Qwen3MoeForCausalLM"
_REMEDY = "correct it, or take the config.json published with the weights"

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
Theta = Annotated[float, Meta(ge=1, le=1e30)]
S = TypeVar("S", bound=msgspec.Struct)


class _Family(msgspec.Struct):
    """What tells this family from others; the values themselves are checked afterwards."""

    architectures: list[str] = []
    model_type: str | None = None
    num_experts: Any = None
    num_local_experts: Any = None


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None


class _Config(msgspec.Struct, kw_only=True):
    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count
    moe_intermediate_size: Count
    num_experts: Count | None = None  # transformers 4
    num_local_experts: Count | None = None  # transformers 5
    num_experts_per_tok: Count
    vocab_size: Count
    rope_theta: Theta = 10000.0  # transformers 4, with rope_scaling
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None  # transformers 5
    rms_norm_eps: NotNegative = 1e-6
    initializer_range: NotNegative = 0.02
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: Count = 32768
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Index] = []
    eos_token_id: Index | Annotated[list[Index], Meta(min_length=1)] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    use_sliding_window: bool = False
    quantization_config: dict[str, Any] = {}

    @property
    def rope(self) -> _Rope:
        return self.rope_parameters or self.rope_scaling or _Rope()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(i for i in range(self.num_hidden_layers) if i not in dense and (i + 1) % step == 0)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return tuple(self.eos_token_id) if isinstance(self.eos_token_id, list) else (self.eos_token_id,)


def read_shape(model_path: str | Path) -> ModelShape:
    """Read and check `model_path/config.json`. Raises `ModelConfigError` naming file, key, value, rule and remedy."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise ModelConfigError(f"{file} does not exist; give a directory in Hugging Face format")
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file} is not JSON: {error}; {_REMEDY}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} is not a JSON object; {_REMEDY}")
    raw = {key: value for key, value in raw.items() if value is not None}  # null: as if it were not there
    try:
        _check_family(_convert(raw, _Family))
        config = _convert(raw, _Config)
        _check_supported(config)
        shape = _shape(config)
        _check_consistent(config, shape)
    except ValueError as error:
        raise ModelConfigError(f"{file}: {error}") from error
    return shape


def _convert(raw: dict[str, Any], wanted: type[S]) -> S:
    """`raw` checked against a struct. Raises ValueError naming key, value, rule and remedy."""
    try:
        return msgspec.convert(raw, wanted)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).partition(" - at `$.")
        if not path:
            key = rule.split("`")[1]  # Object missing required field `...`
            raise ValueError(f"{key} is missing; {_REMEDY}") from error
        key = re.split(r"[`\[]", path)[0]
        value = reduce(lambda tree, name: tree[name], key.split("."), raw)
        raise ValueError(f"{key}={_shown(value)}: {rule[0].lower()}{rule[1:]}; {_REMEDY}") from error


def _check_family(family: _Family) -> None:
    if family.num_experts is None and family.num_local_experts is None:
        raise ValueError(
            f"{family.architectures or family.model_type} has no experts, and only Mixture-of-Experts models are "
            "trained here; choose a Qwen3-MoE checkpoint"
        )
    if _ARCHITECTURE not in family.architectures:
        raise ValueError(f"architectures={family.architectures} is not supported; choose a {_ARCHITECTURE} checkpoint")


def _check_supported(config: _Config) -> None:
    """Raise ValueError for what the trainer's model cannot compute."""
    if config.quantization_config:
        raise ValueError(
            f"quantization_config={_shown(config.quantization_config)} is not supported: the trainer holds "
            "full-precision weights and would load quantized ones without their scales; use the bf16 checkpoint"
        )
    kind = config.rope.rope_type or config.rope.type or "default"
    refused = {
        f"hidden_act={config.hidden_act!r}": (config.hidden_act != "silu", "the experts use silu"),
        "attention_bias=true": (config.attention_bias, "attention has no bias"),
        "use_sliding_window=true": (config.use_sliding_window, "attention is full and causal"),
        f"rope type {kind!r}": (kind != "default", "only the default rotary embedding is"),
    }
    for what, (wrong, why) in refused.items():
        if wrong:
            raise ValueError(f"{what} is not supported: {why}; choose another checkpoint")


def _shape(config: _Config) -> ModelShape:
    heads = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim or max(1, config.hidden_size // heads),
        ffn_hidden_size=config.intermediate_size,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        num_experts=config.num_experts or config.num_local_experts or 0,
        topk=config.num_experts_per_tok,
        vocab_size=config.vocab_size,
        rope_theta=config.rope.rope_theta or config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        norm_topk_prob=config.norm_topk_prob,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        moe_layers=config.moe_layers,
        eos_token_ids=config.eos_ids,
    )


def _check_consistent(config: _Config, shape: ModelShape) -> None:
    """Raise ValueError for what is missing or contradicts itself."""
    last, dense = shape.num_layers - 1, config.mlp_only_layers
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if not shape.eos_token_ids:
        raise ValueError(f"eos_token_id is missing; without it no response would ever end; {_REMEDY}")
    if max(dense, default=0) > last:
        raise ValueError(f"mlp_only_layers={_shown(dense)}: expected layers from 0 to {last}; {_REMEDY}")
    if not shape.moe_layers:
        raise ValueError(
            "no layer has experts (mlp_only_layers, decoder_sparse_step): not an MoE model; choose another checkpoint"
        )
    if shape.topk > shape.num_experts:
        raise ValueError(f"num_experts_per_tok={shape.topk} exceeds num_experts={shape.num_experts}; {_REMEDY}")
    if heads % groups:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}; {_REMEDY}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
