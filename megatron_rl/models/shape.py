"""The shape of a model: what trainer, engines and rollouts must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.contracts.exit_codes import ExitCode, Failure


class ModelConfigError(Failure, ValueError):
    """A checkpoint's config.json is missing, unreadable or describes a model that is not supported."""

    exit_code = ExitCode.BAD_DATA


@dataclass(frozen=True)
class Yarn:
    """A rotary embedding for sequences `factor` times as long as `positions` (YaRN, arXiv
    2309.00071).
    """

    factor: float
    positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come out of one
    small vector.

    q_rank None: queries are projected directly. A head's query and key are `plain_dim` +
    `rotary_dim` wide. yarn None: the default rotary embedding.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Router:
    """How a token's experts are chosen and weighed.

    normalized: the weights of the chosen experts add up to `scaling`. group_topk of groups: where a
    token may go; 1 of 1 is everywhere. bias: a frozen number for each expert that counts in the
    choice and not in the weights.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scaling: float = 1.0
    groups: int = 1
    group_topk: int = 1
    bias: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A decoder. architecture: its family, as config.json names it. moe_layers: 0-based layers with
    experts.

    A model without experts has none of them, 0 experts and top-0. head_dim: of queries and keys.
    shared_ffn_hidden_size: of the expert that every token passes, 0 without one. eos_token_ids:
    tokens that end a response. initializer_range: standard deviation of fresh weights; it matters
    to a model trained from scratch.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool
    ffn_hidden_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    latent: LatentAttention | None = None
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    topk: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    router: Router = Router()
