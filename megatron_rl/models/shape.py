"""The shape of a model: what trainer, engines and rollouts must agree on."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.contracts.exit_codes import ExitCode, Failure


class ModelConfigError(Failure, ValueError):
    """A checkpoint's config.json is missing, unreadable or describes a model that is not supported."""

    exit_code = ExitCode.BAD_DATA


@dataclass(frozen=True)
class ModelShape:
    """A decoder with experts. moe_layers: 0-based layers with experts. eos_token_ids: tokens that end a response.

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
