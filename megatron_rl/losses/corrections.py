"""Importance weights between the sampling policy and the trainer's policy at step start.

With w_t = π_old(y_t) / π_rollout(y_t), and for a sequence i of |y_i| sampled tokens its ratio at a
`level`:

    token: ρ_t = w_t      sequence: ρ_i = Π_t w_t      geometric: ρ_i = (Π_t w_t)^(1 / |y_i|)

    tis     c = min(ρ, high)
    icepop  c_t = w_t if low ≤ w_t ≤ high else 0
    mis     c_i = ρ_i if low ≤ ρ_i ≤ high else 0

At the geometric level, mis has c_i = 1 instead of ρ_i inside the bounds: it only masks, because a
mean ratio is no importance weight.

tis: truncated importance sampling, Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025). icepop: M(k) of Ring-1T (arXiv 2510.18855), k = w_t. mis: masked
importance sampling, Liu, Li et al., "When Speed Kills Stability" (2025), which has an upper bound
only. The lower bound and the geometric level are from verl's rejection sampling. (DeepSeek-V3.2,
arXiv 2512.02556, also masks by a sequence's mean log-ratio, but only sequences with a negative
advantage. That is not implemented here.)

c is a constant, computed once for a rollout batch. Every loss here is a sum over tokens of min(s A,
clip(s) A) times constants, and for c ≥ 0

    c · min(s A, clip(s) A) = min(s (c A), clip(s) (c A)),

because only the sign of A decides which term is the minimum. Multiplying the advantages by c is
therefore exact. It is exact for a user-defined loss if the loss is linear in its advantages. The
plan's denominators do not change: a token of weight 0 counts as a token without a gradient. Tokens
that were not sampled have c = 1 and do not affect their sequence's ratio.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.config.algorithms import CorrectionSettings
from megatron_rl.losses.clipped_ratio import MAX_LOG_RATIO
from megatron_rl.losses.interface import ResponseTokens
from megatron_rl.losses.sequences import sequence_lengths, spread

# Default bounds (low, high) by kind and level. Those of tis and mis are the defaults of verl's
# rollout correction (`rollout_is_threshold`, `decoupled_seq_is_rs`, `decoupled_geo_rs`). Those of
# icepop are NeMo RL's (docs/guides/prorlv2.md).
_BOUNDS: dict[tuple[str, str], tuple[float, float]] = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("tis", "geometric"): (0.0, 2.0),
    ("icepop", "token"): (0.5, 5.0),
    ("mis", "sequence"): (0.5, 2.0),
    ("mis", "geometric"): (0.999, 1.001),
}
_LEVELS = {"tis": "token", "icepop": "token", "mis": "sequence"}


class Correction:
    """Applies the weights that `algo.correction` selects, and reports metrics of all kinds."""

    def __init__(self, settings: CorrectionSettings) -> None:
        self._kind = settings.kind
        self._levels = dict(_LEVELS)
        if settings.level is not None and settings.kind != "off":
            self._levels[settings.kind] = settings.level
        self._bounds = {kind: _BOUNDS[kind, level] for kind, level in self._levels.items()}
        if settings.kind != "off":
            low, high = self._bounds[settings.kind]
            if settings.low is not None:
                low = settings.low
            if settings.high is not None:
                high = settings.high
            self._bounds[settings.kind] = (low, high)

    def apply(self, response: ResponseTokens) -> ResponseTokens:
        """Multiply the advantages by c. Returns the same object with kind=off."""
        if self._kind == "off":
            return response
        return replace(
            response, advantages=response.advantages * self.weights(self._kind, response)
        )

    def weights(self, kind: str, response: ResponseTokens) -> torch.Tensor:
        """Return c, float32 [T], at least 0. NaN if π_old is NaN or a ratio is infinite."""
        ratio = self._ratios(kind, response)
        low, high = self._bounds[kind]
        if kind == "tis":
            weight = ratio.clamp(max=high)
        else:
            inside = torch.ones_like(ratio) if self._levels[kind] == "geometric" else ratio
            weight = torch.where((ratio >= low) & (ratio <= high), inside, ratio * 0.0)
        return torch.where(_is_sampled(response), weight, torch.ones_like(weight))

    def metrics(self, response: ResponseTokens) -> dict[str, torch.Tensor]:
        """Return (weighted sum, weight) pairs over the sampled tokens.

        mismatch/tis_weight_mean: mean c of tis.
        mismatch/tis_truncated: share of tokens above the bound of tis.
        mismatch/icepop_masked, mismatch/mis_masked: share of tokens outside the bounds.

        The selected kind uses the settings' level and bounds, and the others use their defaults.
        """
        is_sampled = _is_sampled(response)
        count = is_sampled.float().sum()

        def share(values: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.where(is_sampled, values.float(), 0.0).sum(), count])

        return {
            "mismatch/tis_weight_mean": share(self.weights("tis", response)),
            "mismatch/tis_truncated": share(self._ratios("tis", response) > self._bounds["tis"][1]),
            "mismatch/icepop_masked": share(self.weights("icepop", response) == 0),
            "mismatch/mis_masked": share(self.weights("mis", response) == 0),
        }

    def _ratios(self, kind: str, response: ResponseTokens) -> torch.Tensor:
        """Return ρ of each token at the kind's level, float32 [T], with |log ρ| limited to 10."""
        difference = (response.old_logprobs - response.rollout_logprobs).detach().float()
        is_sampled = _is_sampled(response)
        log_ratio = torch.where(is_sampled, difference, 0.0)
        level = self._levels[kind]
        if level != "token":
            lengths = sequence_lengths(response.cu_seqlens)
            sequences = torch.arange(len(lengths), device=log_ratio.device)
            index = spread(sequences, lengths, log_ratio.numel())
            zeros = torch.zeros(len(lengths), device=log_ratio.device)
            total = zeros.index_add(0, index, log_ratio)
            if level == "geometric":
                total = total / zeros.index_add(0, index, is_sampled.float()).clamp(min=1)
            log_ratio = total[index]
        # 0 · inf is NaN, so the clamp does not hide an infinity.
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() + log_ratio * 0


def _is_sampled(response: ResponseTokens) -> torch.Tensor:
    return ~response.rollout_logprobs.isnan()
