"""What the `config.json` of every family holds, as transformers 4 or 5 writes it; a family adds its
own keys.
"""

from __future__ import annotations

import re
from functools import reduce
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

REMEDY = "correct it, or take the config.json published with the weights"

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
Theta = Annotated[float, Meta(ge=1, le=1e30)]
S = TypeVar("S", bound=msgspec.Struct)


class Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    factor: Theta | None = None  # these six of YaRN
    original_max_position_embeddings: Count | None = None
    beta_fast: NotNegative = 32.0
    beta_slow: NotNegative = 1.0
    mscale: NotNegative = 0.0
    mscale_all_dim: NotNegative = 0.0

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class DecoderConfig(msgspec.Struct, kw_only=True):
    """The keys of any decoder. A key that is missing has the value that transformers gives it."""

    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count
    vocab_size: Count
    rope_theta: Theta = 10000.0  # transformers 4, with rope_scaling
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None  # transformers 5
    rms_norm_eps: NotNegative = 1e-6
    initializer_range: NotNegative = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: Count = 32768
    eos_token_id: Index | Annotated[list[Index], Meta(min_length=1)] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    quantization_config: dict[str, Any] = {}

    @property
    def rope(self) -> Rope:
        return self.rope_parameters or self.rope_scaling or Rope()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return (
            tuple(self.eos_token_id)
            if isinstance(self.eos_token_id, list)
            else (self.eos_token_id,)
        )


def convert(raw: dict[str, Any], wanted: type[S]) -> S:
    """`raw` checked against a struct. Raises ValueError naming key, value, rule and remedy."""
    try:
        return msgspec.convert(raw, wanted)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).partition(" - at `$.")
        if not path:
            key = rule.split("`")[1]  # Object missing required field `...`
            raise ValueError(f"{key} is missing; {REMEDY}") from error
        key = re.split(r"[`\[]", path)[0]
        value = reduce(lambda tree, name: tree[name], key.split("."), raw)
        raise ValueError(f"{key}={shown(value)}: {rule[0].lower()}{rule[1:]}; {REMEDY}") from error


def refuse_unsupported(
    config: DecoderConfig, *, ropes: tuple[str, ...] = ("default",), **refused: tuple[bool, str]
) -> None:
    """Raise ValueError for what the trainer's model cannot compute.

    ropes: the rotary embeddings that it can. refused: by key, whether it is wrong, and why.
    """
    if config.quantization_config:
        raise ValueError(
            f"quantization_config={shown(config.quantization_config)} is not supported: the trainer holds "
            "full-precision weights and would load quantized ones without their scales; use the bf16 checkpoint"
        )
    kind = config.rope.kind
    rules = {
        f"hidden_act={config.hidden_act!r}": (config.hidden_act != "silu", "the MLPs use silu"),
        "attention_bias=true": (config.attention_bias, "attention has no bias"),
        f"rope type {kind!r}": (
            kind not in ropes,
            f"only {' and '.join(ropes)} rotary embeddings are",
        ),
    }
    for key, rule in refused.items():
        value = getattr(config, key)
        rules[f"{key}={str(value).lower() if isinstance(value, bool) else shown(value)}"] = rule
    for what, (wrong, why) in rules.items():
        if wrong:
            raise ValueError(f"{what} is not supported: {why}; choose another checkpoint")


def common_shape(config: DecoderConfig) -> dict[str, Any]:
    """The part of a `ModelShape` that every family shares.

    Raises ValueError for what contradicts itself.
    """
    heads = config.num_attention_heads
    groups = config.num_key_value_heads or heads
    if not config.eos_ids:
        raise ValueError(
            f"eos_token_id is missing; without it no response would ever end; {REMEDY}"
        )
    if heads % groups:
        raise ValueError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}; {REMEDY}"
        )
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": config.head_dim or max(1, config.hidden_size // heads),
        "ffn_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope.rope_theta or config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_ids": config.eos_ids,
    }


def refuse_too_many(topk: int, experts: int, key: str) -> None:
    """Raise ValueError where a token would go to more experts than there are."""
    if topk > experts:
        raise ValueError(f"num_experts_per_tok={topk} exceeds {key}={experts}; {REMEDY}")


def shown(value: Any) -> str:
    """A value of config.json for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
