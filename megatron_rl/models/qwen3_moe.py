"""The model's shape, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ARCHITECTURES = ("Qwen3MoeForCausalLM",)
_LARGEST_INTEGER = 2**31 - 1


class ModelConfigError(ValueError):
    """A checkpoint's config.json is missing, unreadable or describes a model that is not supported."""


@dataclass(frozen=True)
class ModelShape:
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


def read_shape(model_path: str | Path) -> ModelShape:
    """Read and check `model_path/config.json`. Raises `ModelConfigError` naming key, value, rule and remedy."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise ModelConfigError(
            f"model.path={str(model_path)!r}: {file} does not exist; give a directory in Hugging Face format"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"model.path={str(model_path)!r}: {file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"model.path={str(model_path)!r}: {file} is not a JSON object")
    _check_architecture(file, raw)
    return _build(_Reader(file, raw))


def _check_architecture(file: Path, raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise _broken(file, "architectures", architectures, "a list of names")
    if "num_experts" not in raw and "num_local_experts" not in raw:
        raise ModelConfigError(
            f"{file}: {architectures or raw.get('model_type')} has no experts, and only Mixture-of-Experts models are "
            "trained here; choose a Qwen3-MoE checkpoint"
        )
    if not any(name in _ARCHITECTURES for name in architectures):
        raise ModelConfigError(
            f"{file}: architectures={architectures} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        raise ModelConfigError(
            f"{file}: quantization_config={_shown(raw['quantization_config'])} is not supported: the trainer holds "
            "full-precision weights and would load quantized ones without their scales; use the bf16 checkpoint (the "
            "engines quantize by engine.quantization)"
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

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of several spellings that is there, and its value; None when none is."""
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        return name, self.raw.get(name)

    def number(self, name: str, *, default: float, minimum: float = 1) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= sys.float_info.max:
            raise _broken(self.file, name, value, f"a finite number of at least {minimum:g}")
        return float(value)

    def integer(self, *names: str, default: int | None = None) -> int:
        name, value = self.first(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelConfigError(f"{self.file}: {name} is missing")
        if not _is_integer(value, minimum=1):
            raise _broken(self.file, name, value, f"a whole number from 1 to {_LARGEST_INTEGER}")
        return value

    def boolean(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise _broken(self.file, name, value, "true or false")

    def dense_layers(self, num_layers: int) -> frozenset[int]:
        layers = self.raw.get("mlp_only_layers")
        if layers is None:
            return frozenset()
        if not isinstance(layers, list) or not all(_is_integer(i, maximum=num_layers - 1) for i in layers):
            raise _broken(self.file, "mlp_only_layers", layers, f"a list of layers from 0 to {num_layers - 1}")
        return frozenset(layers)

    def rope_theta(self) -> float:
        name, parameters = self.first("rope_parameters", "rope_scaling")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, dict):
            raise _broken(self.file, name, parameters, "an object")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise ModelConfigError(
                f"{self.file}: rope type {kind!r} is not supported; only the default rotary embedding is"
            )
        outer = self.number("rope_theta", default=10000.0)
        return _Reader(self.file, parameters).number("rope_theta", default=outer)

    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.raw.get("eos_token_id")
        if eos is None:
            raise ModelConfigError(f"{self.file}: eos_token_id is missing; without it no response would ever end")
        ids = eos if isinstance(eos, list) else [eos]
        if not ids or not all(_is_integer(i) for i in ids):
            raise _broken(self.file, "eos_token_id", eos, "a token id or a list of at least one")
        return tuple(ids)


def _is_integer(value: Any, *, minimum: int = 0, maximum: int = _LARGEST_INTEGER) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _broken(file: Path, name: str, value: Any, rule: str) -> ModelConfigError:
    return ModelConfigError(
        f"{file}: {name}={_shown(value)} is not {rule}; correct it, or take the config.json published with the weights"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _build(reader: _Reader) -> ModelShape:
    num_layers = reader.integer("num_hidden_layers")
    heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    step = reader.integer("decoder_sparse_step", default=1)
    dense = reader.dense_layers(num_layers)
    config = ModelShape(
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
        norm_topk_prob=reader.boolean("norm_topk_prob"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        max_position_embeddings=reader.integer("max_position_embeddings", default=32768),
        moe_layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        eos_token_ids=reader.eos_token_ids(),
    )
    _check_shape(reader.file, config)
    return config


def _check_shape(file: Path, config: ModelShape) -> None:
    if not config.moe_layers:
        raise ModelConfigError(f"{file}: no layer has experts (mlp_only_layers, decoder_sparse_step): not an MoE model")
    if config.topk > config.num_experts:
        raise ModelConfigError(f"{file}: num_experts_per_tok={config.topk} exceeds num_experts={config.num_experts}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelConfigError(
            f"{file}: num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
