"""The model's shape, read from a Hugging Face `config.json`.

Invariant: a `MoeModelConfig` describes a model that can be built, trained with replayed routes and served: everything
else is refused here, before torch is imported. Both spellings of transformers 4 and 5 are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ARCHITECTURES = ("Qwen3MoeForCausalLM",)


class ModelConfigError(ValueError):
    """A checkpoint's config.json is missing, unreadable or describes a model that is not supported."""


@dataclass(frozen=True)
class MoeModelConfig:
    """A Qwen3-MoE decoder. moe_layers: 0-based layers with experts. eos_token_ids: tokens that end a response.

    initializer_range: standard deviation of fresh weights; it matters to a model that is trained from scratch.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    moe_ffn_hidden_size: int
    num_experts: int
    topk: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    initializer_range: float
    norm_topk_prob: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    moe_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_layers)) - set(self.moe_layers)))


def read_hf_config(model_path: str | Path) -> MoeModelConfig:
    """Read and check `model_path/config.json`. Raises `ModelConfigError` naming key, value, rule and remedy."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise ModelConfigError(
            f"model.path={str(model_path)!r}: {file} does not exist; give a directory in Hugging Face format"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelConfigError(f"model.path={str(model_path)!r}: {file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"model.path={str(model_path)!r}: {file} is not a JSON object")
    _check_architecture(file, raw)
    return _build(_Reader(file, raw))


def _check_architecture(file: Path, raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    if "num_experts" not in raw and "num_local_experts" not in raw:
        raise ModelConfigError(
            f"{file}: {architectures or raw.get('model_type')} has no experts, and only Mixture-of-Experts models are "
            "trained here; choose a Qwen3-MoE checkpoint"
        )
    if not any(name in _ARCHITECTURES for name in architectures):
        raise ModelConfigError(
            f"{file}: architectures={architectures} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"{file}: hidden_act={raw['hidden_act']!r} is not supported; the experts use silu")
    if raw.get("attention_bias"):
        raise ModelConfigError(f"{file}: attention_bias=true is not supported; use a checkpoint without attention bias")
    if raw.get("use_sliding_window"):
        raise ModelConfigError(f"{file}: use_sliding_window=true is not supported; attention is full and causal")


@dataclass(frozen=True)
class _Reader:
    file: Path
    raw: dict[str, Any]

    def number(self, *names: str, default: float | None = None, minimum: float = 1) -> float:
        for name in names:
            if name in self.raw and self.raw[name] is not None:
                value = self.raw[name]
                if isinstance(value, bool) or not isinstance(value, int | float) or value < minimum:
                    raise ModelConfigError(f"{self.file}: {name}={value!r} is not a number of at least {minimum:g}")
                return value
        if default is None:
            raise ModelConfigError(f"{self.file}: {names[0]} is missing")
        return default

    def integer(self, *names: str, default: int | None = None) -> int:
        return int(self.number(*names, default=default))

    def rope_theta(self) -> float:
        parameters = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise ModelConfigError(
                f"{self.file}: rope type {kind!r} is not supported; only the default rotary embedding is"
            )
        return float(parameters.get("rope_theta") or self.number("rope_theta", default=10000.0))

    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.raw.get("eos_token_id")
        if eos is None:
            raise ModelConfigError(f"{self.file}: eos_token_id is missing; without it no response would ever end")
        return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _build(reader: _Reader) -> MoeModelConfig:
    num_layers = reader.integer("num_hidden_layers")
    heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    step = reader.integer("decoder_sparse_step", default=1)
    dense = set(reader.raw.get("mlp_only_layers") or [])
    config = MoeModelConfig(
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=reader.integer("num_key_value_heads", default=heads),
        head_dim=reader.integer("head_dim", default=max(1, hidden // heads)),
        ffn_hidden_size=reader.integer("intermediate_size"),
        moe_ffn_hidden_size=reader.integer("moe_intermediate_size"),
        num_experts=reader.integer("num_experts", "num_local_experts"),
        topk=reader.integer("num_experts_per_tok"),
        vocab_size=reader.integer("vocab_size"),
        rope_theta=reader.rope_theta(),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6, minimum=0.0),
        initializer_range=reader.number("initializer_range", default=0.02, minimum=0.0),
        norm_topk_prob=bool(reader.raw.get("norm_topk_prob", False)),
        tie_word_embeddings=bool(reader.raw.get("tie_word_embeddings", False)),
        max_position_embeddings=reader.integer("max_position_embeddings", default=32768),
        moe_layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        eos_token_ids=reader.eos_token_ids(),
    )
    _check_shape(reader.file, config)
    return config


def _check_shape(file: Path, config: MoeModelConfig) -> None:
    if not config.moe_layers:
        raise ModelConfigError(f"{file}: no layer has experts (mlp_only_layers, decoder_sparse_step): not an MoE model")
    if config.topk > config.num_experts:
        raise ModelConfigError(f"{file}: num_experts_per_tok={config.topk} exceeds num_experts={config.num_experts}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelConfigError(
            f"{file}: num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
