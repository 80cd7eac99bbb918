"""Keys of `config.json` that all model families share, as transformers 4 or 5 writes them."""

from __future__ import annotations

import re
from functools import reduce
from typing import Annotated, Any

import msgspec
from msgspec import Meta

REMEDY = "correct it, or take the config.json published with the weights"

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
Theta = Annotated[float, Meta(ge=1, le=1e30)]

_MAX_VALUE_LENGTH = 80  # characters of a value in a message


class RopeConfig(msgspec.Struct):
    """Rotary embedding. The keys from `factor` on are YaRN's."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: float | None = None
    factor: Theta | None = None
    original_max_position_embeddings: Count | None = None
    beta_fast: NotNegative = 32.0
    beta_slow: NotNegative = 1.0
    mscale: NotNegative = 0.0
    mscale_all_dim: NotNegative = 0.0

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class DecoderConfig(msgspec.Struct, kw_only=True):
    """Keys of any decoder. A missing key has the default of transformers."""

    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count
    vocab_size: Count
    rope_theta: Theta = 10000.0  # transformers 4, with rope_scaling
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeConfig | None = None
    rope_parameters: RopeConfig | None = None  # transformers 5
    rms_norm_eps: NotNegative = 1e-6
    initializer_range: NotNegative = 0.02
    embedding_initializer_range: NotNegative | None = None  # unknown to transformers
    tie_word_embeddings: bool = False
    max_position_embeddings: Count = 32768
    eos_token_id: Index | Annotated[list[Index], Meta(min_length=1)] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    quantization_config: dict[str, Any] = {}

    @property
    def rope(self) -> RopeConfig:
        return self.rope_parameters or self.rope_scaling or RopeConfig()

    @property
    def theta(self) -> float:
        """The base of the rotary embedding."""
        return self.rope.rope_theta or self.rope_theta

    @property
    def rotary_share(self) -> float:
        """The share of a head's dimensions that is rotated."""
        share = self.rope.partial_rotary_factor
        return self.partial_rotary_factor if share is None else share

    @property
    def eos_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        if isinstance(self.eos_token_id, list):
            return tuple(self.eos_token_id)
        return (self.eos_token_id,)


def parse_config[ConfigType: msgspec.Struct](
    raw: dict[str, Any], config_type: type[ConfigType]
) -> ConfigType:
    """Convert `raw` to a struct. Raises ValueError naming key, value, rule and remedy."""
    try:
        return msgspec.convert(raw, config_type)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).partition(" - at `$.")
        if not path:
            key = rule.split("`")[1]  # Object missing required field `...`
            raise ValueError(f"{key} is missing; {REMEDY}") from error
        key = re.split(r"[`\[]", path)[0]
        value = reduce(lambda tree, name: tree[name], key.split("."), raw)
        raise ValueError(
            f"{key}={format_json(value)}: {rule[0].lower()}{rule[1:]}; {REMEDY}"
        ) from error


def refuse_unsupported(
    config: DecoderConfig, *, ropes: tuple[str, ...] = ("default",), **rules: tuple[bool, str]
) -> None:
    """Raise ValueError for settings that the trainer's model does not implement.

    ropes: supported kinds of rotary embeddings.
    rules: for each key, whether its value is unsupported, and the reason.
    """
    if config.quantization_config:
        raise ValueError(
            f"quantization_config={format_json(config.quantization_config)} is not supported: "
            "the trainer holds full-precision weights and would load quantized ones without their "
            "scales; use the bf16 checkpoint"
        )
    kind = config.rope.kind
    checks = {
        f"hidden_act={config.hidden_act!r}": (config.hidden_act != "silu", "the MLPs use silu"),
        "attention_bias=true": (config.attention_bias, "attention has no bias"),
        f"rope type {kind!r}": (
            kind not in ropes,
            f"only {' and '.join(ropes)} rotary embeddings are",
        ),
        f"rope_theta={config.theta!r}": (
            not config.theta.is_integer(),
            "the trainer takes a whole number, and engines would rotate by another angle",
        ),
        f"partial_rotary_factor={config.rotary_share!r}": (
            config.rotary_share != 1,
            "the trainer rotates every dimension of a head",
        ),
    }
    for key, rule in rules.items():
        checks[f"{key}={format_json(getattr(config, key))}"] = rule
    for setting, (is_unsupported, reason) in checks.items():
        if is_unsupported:
            raise ValueError(f"{setting} is not supported: {reason}; choose another checkpoint")


def common_shape(config: DecoderConfig) -> dict[str, Any]:
    """Return the arguments of `ModelShape` that all families share.

    Raises ValueError for contradicting values.
    """
    heads = config.num_attention_heads
    groups = config.num_key_value_heads or heads
    if not config.eos_ids:
        raise ValueError(f"eos_token_id is missing; without it no response would end; {REMEDY}")
    if heads % groups:
        raise ValueError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}; "
            f"{REMEDY}"
        )
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": config.head_dim or max(1, config.hidden_size // heads),
        "ffn_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rope_theta": config.theta,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "embedding_initializer_range": config.embedding_initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_ids": config.eos_ids,
    }


def check_topk(topk: int, experts: int, key: str) -> None:
    """Raise ValueError if tokens choose more experts than a layer has."""
    if topk > experts:
        raise ValueError(f"num_experts_per_tok={topk} exceeds {key}={experts}; {REMEDY}")


def format_json(value: Any) -> str:
    """Return a value of config.json for a message, truncated if long."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."
