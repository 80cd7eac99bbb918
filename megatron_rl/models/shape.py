"""Shape of a model. Trainer, engines and rollouts must agree on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.contracts.exit_codes import ExitCode, Failure

if TYPE_CHECKING:
    from megatron_rl.contracts.routes import RouteShape


class ModelConfigError(Failure, ValueError):
    """A config.json is missing or unreadable, or describes an unsupported model."""

    exit_code = ExitCode.BAD_DATA


@dataclass(frozen=True)
class Yarn:
    """Rotary embedding for sequences up to `factor` times `positions` (YaRN, arXiv 2309.00071)."""

    factor: float
    positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention, with keys and values from one small vector.

    DeepSeek-V2, arXiv 2405.04434.

    q_rank: width of the compressed query, None if queries are not compressed.
    kv_rank: width of the small vector.
    plain_dim, rotary_dim: widths of the two parts of a head's query and key.
    value_dim: width of a head's value.
    yarn: None for the default rotary embedding.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Router:
    """Selection and weights of a token's experts.

    normalizes_weights: whether the weights of the selected experts are normalised.
    scaling: factor of the weights. Normalised weights add up to it.
    groups, group_topk: number of expert groups, and how many of them may hold the experts of a
    token. bias: whether each expert has a frozen number that counts for the selection only.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalizes_weights: bool = True
    scaling: float = 1.0
    groups: int = 1
    group_topk: int = 1
    bias: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder.

    architecture: model family, as config.json names it.
    head_dim: width of a head's queries and keys.
    initializer_range: standard deviation of random weights.
    embedding_initializer_range: that of the embedding, None for the same.
    eos_token_ids: tokens that config.json names as ends of a response. `Tokenizer.eos_ids` has all.
    latent: None for ordinary attention.
    moe_layers: 0-based layers with experts, empty for a model without experts.
    num_experts, topk: routed experts of a layer and of a token, 0 without experts.
    shared_ffn_hidden_size: width of the expert that processes every token, 0 without one.
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
    embedding_initializer_range: float | None = None
    latent: LatentAttention | None = None
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    topk: int = 0
    moe_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    router: Router = Router()

    @property
    def route_shape(self) -> RouteShape:
        """The shape of the model's routes."""
        # A refused configuration needs no numpy, which takes time to import.
        from megatron_rl.contracts.routes import RouteShape

        return RouteShape(
            moe_layers=self.moe_layers,
            num_hidden_layers=self.num_layers,
            num_experts=self.num_experts,
            topk=self.topk,
        )
