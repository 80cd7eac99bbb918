"""Importance weights for what is left between the policy that sampled the tokens and the trainer's
at step start.

With w_t = π_old(y_t) / π_rollout(y_t), and for a sequence i of |y_i| sampled tokens its ratio at a
`level`:

    token: ρ_t = w_t      sequence: ρ_i = Π_t w_t      geometric: ρ_i = (Π_t w_t)^(1 / |y_i|)

    tis     c = min(ρ, high)
    icepop  c_t = w_t if low ≤ w_t ≤ high else 0
    mis     c_i = ρ_i if low ≤ ρ_i ≤ high else 0; at the geometric level 1 inside: a mean is no weight, it only masks

tis: truncated importance sampling, Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025). icepop: M(k) of Ring-1T (arXiv 2510.18855), k = w_t. mis: masked
importance sampling, Liu, Li et al., "When Speed Kills Stability" (2025), which masks above an upper
bound alone; low is of verl's rejection sampling, as the geometric level is. (DeepSeek-V3.2, arXiv
2512.02556, masks by a sequence's mean log-ratio too, but only what has a negative advantage: that
is not done here.)

c is a constant, computed once for a rollout batch. Every loss here is a sum over tokens of min(s A,
clip(s) A) times constants, and for c ≥ 0

    c · min(s A, clip(s) A) = min(s (c A), clip(s) (c A)),

as the sign of A alone tells which branch is taken; so advantages are multiplied by c, exactly,
whatever the loss. A user's own is corrected as far as it is linear in its advantages. Denominators
stay those of the plan: a token of weight 0 counts as one without a gradient. Tokens that nobody
sampled have c = 1 and no part in their sequence's ratio.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.config.algorithms import CorrectionSettings
from megatron_rl.losses.clipped_ratio import MAX_LOG_RATIO
from megatron_rl.losses.interface import ResponseTokens
from megatron_rl.losses.sequences import sequence_lengths, spread

# (low, high) by kind and level. tis, mis: defaults of verl's rollout correction
# (`rollout_is_threshold`, `decoupled_seq_is_rs`, `decoupled_geo_rs`). icepop: NeMo RL's for it
# (docs/guides/prorlv2.md)
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
    """Applies what `algo.correction` chooses, and reports what each of its kinds would do,
    whichever is chosen.
    """

    def __init__(self, settings: CorrectionSettings) -> None:
        self._kind = settings.kind
        self._levels = dict(_LEVELS)
        if settings.level is not None and settings.kind != "off":
            self._levels[settings.kind] = settings.level
        self._bounds = {kind: _BOUNDS[kind, level] for kind, level in self._levels.items()}
        if settings.kind != "off":
            low, high = self._bounds[settings.kind]
            chosen = (
                low if settings.low is None else settings.low,
                high if settings.high is None else settings.high,
            )
            self._bounds[settings.kind] = chosen

    def corrected(self, response: ResponseTokens) -> ResponseTokens:
        """The same tokens with advantages times c; the very same object with kind=off."""
        if self._kind == "off":
            return response
        return replace(
            response, advantages=response.advantages * self.weights(self._kind, response)
        )

    def weights(self, kind: str, response: ResponseTokens) -> torch.Tensor:
        """c, float32 [T], at least 0; NaN where π_old is NaN or a ratio is infinite."""
        ratio, (low, high) = self._ratios(kind, response), self._bounds[kind]
        if kind == "tis":
            weight = ratio.clamp(max=high)
        else:
            inside = torch.ones_like(ratio) if self._levels[kind] == "geometric" else ratio
            weight = torch.where((ratio >= low) & (ratio <= high), inside, ratio * 0.0)
        return torch.where(_sampled(response), weight, torch.ones_like(weight))

    def metrics(self, response: ResponseTokens) -> dict[str, torch.Tensor]:
        """(weighted sum, weight) pairs over the tokens that were sampled.

        mismatch/tis_weight_mean: c of tis. mismatch/tis_truncated: share of tokens above its bound.
        mismatch/icepop_masked, mismatch/mis_masked: share of tokens outside of the bounds of icepop
        and mis. Levels and bounds are those of the settings for the kind that they choose, and the
        defaults for the others.
        """
        sampled = _sampled(response)
        count = sampled.float().sum()

        def share(values: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.where(sampled, values.float(), 0.0).sum(), count])

        return {
            "mismatch/tis_weight_mean": share(self.weights("tis", response)),
            "mismatch/tis_truncated": share(self._ratios("tis", response) > self._bounds["tis"][1]),
            "mismatch/icepop_masked": share(self.weights("icepop", response) == 0),
            "mismatch/mis_masked": share(self.weights("mis", response) == 0),
        }

    def _ratios(self, kind: str, response: ResponseTokens) -> torch.Tensor:
        """ρ of each token, at the kind's level, float32 [T]; its logarithm is limited to ±10."""
        difference = (response.old_logprobs - response.rollout_logprobs).detach().float()
        log_ratio, level = torch.where(_sampled(response), difference, 0.0), self._levels[kind]
        if level != "token":
            lengths, count = sequence_lengths(response.cu_seqlens), log_ratio.numel()
            index = spread(torch.arange(len(lengths), device=log_ratio.device), lengths, count)
            empty = torch.zeros(len(lengths), device=log_ratio.device)
            total = empty.index_add(0, index, log_ratio)
            if level == "geometric":
                total = total / empty.index_add(0, index, _sampled(response).float()).clamp(min=1)
            log_ratio = total[index]
        limited = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return limited.exp() + log_ratio * 0  # 0 · inf: no limit hides an infinity


def _sampled(response: ResponseTokens) -> torch.Tensor:
    return ~response.rollout_logprobs.isnan()
