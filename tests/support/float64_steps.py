"""Whole training steps in float64, written from the formulas.

Advantages, GRPO, ESPO, CISPO, KL penalty, entropy bonus, clipping, learning-rate schedule, AdamW.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_rl.config.algorithms import (
    AlgoSettings,
    CispoSettings,
    EspoSettings,
    GrpoSettings,
)
from megatron_rl.config.schema import OptimizerSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.rollout import Rollout
from tests.support.float64_model import Float64Model

_MIN_DIMENSIONS_TO_DECAY = 2  # the weights of norms are not decayed


def advantages_of(groups: Sequence[Group]) -> dict[str, float]:
    """Return the advantages of rollouts of mixed groups, by id.

    A = (c - mean) / (std + 1e-6), with c the correctness of 0 or 1 and std over n - 1. Shaping by
    x = clip(c - reward) gives A (1 - x / 2) where c is 1, and A (1 + x / 2) where it is 0. It is
    multiplied by the weight of the group. Rollouts without a verdict do not count.
    """
    advantages: dict[str, float] = {}
    for group in groups:
        refs = [r for r in group.rollouts if r.verdict.reward is not None]
        scores = torch.tensor([r.verdict.correctness for r in refs], dtype=torch.float64)
        rewards = torch.tensor([r.verdict.reward for r in refs], dtype=torch.float64)
        if len(scores.unique()) < 2:
            continue
        penalties = (scores - rewards).clamp(0, 1)
        differences = scores - scores.mean()
        std = (differences.square().sum() / (len(refs) - 1)).sqrt()
        factors = 1 + torch.where(scores == 1, -0.5, 0.5) * penalties
        values = (group.weight * factors * differences / (std + 1e-6)).tolist()
        advantages |= dict(zip([r.rollout_id for r in refs], values, strict=True))
    return advantages


def entropy_advantages_of(groups: Sequence[Group], alpha: float) -> dict[str, float]:
    """Return α for rollouts of all-correct groups and -α in all-incorrect groups, by id.

    All rollouts of such a group have a verdict.
    """
    alphas: dict[str, float] = {}
    for group in groups:
        scores = {r.verdict.correctness for r in group.rollouts}
        if len(scores) == 1:
            group_alpha = alpha if scores == {1.0} else -alpha
            alphas |= dict.fromkeys([r.rollout_id for r in group.rollouts], group_alpha)
    return alphas


def weights_of(groups: Sequence[Group]) -> dict[str, float]:
    """Return the weight of each rollout's group, by id."""
    return {r.rollout_id: group.weight for group in groups for r in group.rollouts}


@dataclass(frozen=True)
class Sequence64:
    """One rollout as the model reads it.

    inputs: [n]. routes: [n, layers, top-k].
    rows: rows of `inputs` whose next token, in `targets`, is trained.
    rollout_logprobs: log-probabilities of the targets when they were sampled.
    """

    inputs: torch.Tensor
    routes: torch.Tensor | None
    rows: torch.Tensor
    targets: torch.Tensor
    rollout_logprobs: torch.Tensor

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> "Sequence64":
        tokens: list[int] = []
        trainable: list[bool] = []
        logprobs: list[float] = []
        for segment in rollout.segments:
            count = len(segment.tokens)
            tokens += segment.tokens.tolist()
            trainable += [segment.trainable] * count
            logprobs += [0.0] * count if segment.logprobs is None else segment.logprobs.tolist()
        rows = [i - 1 for i in range(1, len(tokens)) if trainable[i]]
        return cls(
            inputs=torch.tensor(tokens[:-1]),
            routes=None if rollout.routes is None else torch.tensor(rollout.routes.tolist()),
            rows=torch.tensor(rows),
            targets=torch.tensor([tokens[i + 1] for i in rows]),
            rollout_logprobs=torch.tensor([logprobs[i + 1] for i in rows], dtype=torch.float64),
        )


@dataclass
class Means:
    """Sums and weights of the metrics that the trainer reports as means."""

    totals: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, values: torch.Tensor | float, weight: float | None = None) -> None:
        """Add the sum of values. weight: None for their number."""
        values = torch.as_tensor(values, dtype=torch.float64)
        pair = self.totals.setdefault(name, [0.0, 0.0])
        pair[0] += float(values.sum())
        pair[1] += values.numel() if weight is None else weight

    def values(self) -> dict[str, float]:
        """Return the means."""
        return {name: total / weight for name, (total, weight) in self.totals.items()}


@dataclass
class Float64Trainer:
    """Trains a model step by step.

    grad_norms, rates: of every optimizer step so far.
    """

    model: Float64Model
    algo: AlgoSettings
    optimizer: OptimizerSettings
    total_steps: int
    temperature: float
    grad_norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._moments = {
            name: (torch.zeros_like(weight), torch.zeros_like(weight))
            for name, weight in self.model.weights.items()
        }

    def train(
        self,
        steps: Sequence[Sequence[str]],
        rollouts: Mapping[str, Rollout],
        advantages: Mapping[str, tuple[float, float]],
        weights: Mapping[str, float],
    ) -> dict[str, float]:
        """Train one rollout batch and return its metrics.

        The old policy is computed once, then there is an optimizer step for each list of ids.

        advantages: (w A, 0) of mixed groups, (0, ±α) of zero-variance groups, which do not count in
        the denominators.
        weights: w of each rollout's group.
        """
        means = Means()
        sequences = {
            name: Sequence64.from_rollout(rollouts[name]) for step in steps for name in step
        }
        with torch.no_grad():
            old_values = {
                name: self._old_values(sequence, means) for name, sequence in sequences.items()
            }
        for step in steps:
            loss = self._loss(step, sequences, old_values, advantages, weights, means)
            loss = loss + self._regularization(step, sequences, advantages, weights, means)
            means.add("train/loss", loss.detach())
            tensors = list(self.model.weights.values())
            self._update(torch.autograd.grad(loss, tensors, materialize_grads=True))
            means.add("train/grad_norm", self.grad_norms[-1])
        return means.values() | {"train/lr": self.rates[-1]}

    def _loss(
        self,
        step: Sequence[str],
        sequences: Mapping[str, Sequence64],
        old_values: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        advantages: Mapping[str, tuple[float, float]],
        weights: Mapping[str, float],
        means: Means,
    ) -> torch.Tensor:
        """Return the loss of an optimizer step. old_values: of the old policy."""
        mixed_ids = [name for name in step if advantages[name][1] == 0]
        denominator = sum(weights[name] * self._count(sequences[name].rows) for name in mixed_ids)
        loss = torch.zeros((), dtype=torch.float64)
        for name in step:
            logprob, _ = self._logprobs(sequences[name])
            old_logprob, entropy = old_values[name]
            token_advantages = _token_advantages(*advantages[name], entropy, weights[name])
            kind = "mixed" if name in mixed_ids else "zero_variance"
            weight = weights[name] * len(entropy)
            means.add(f"policy/advantage_{kind}", token_advantages.abs(), weight)
            objective = self._objective(logprob, old_logprob, entropy, token_advantages, means)
            loss = loss - objective.sum() / denominator
        return loss

    def _regularization(
        self,
        step: Sequence[str],
        sequences: Mapping[str, Sequence64],
        advantages: Mapping[str, tuple[float, float]],
        weights: Mapping[str, float],
        means: Means,
    ) -> torch.Tensor:
        """Return coef · KL - entropy_coef · H of an optimizer step.

        Both are sums over all tokens, divided by the weighted tokens of mixed groups.
        """
        total = torch.zeros((), dtype=torch.float64)
        if not self.algo.kl.reference:
            return total
        reference = Float64Model.read(Path(self.algo.kl.reference))
        mixed_ids = [name for name in step if advantages[name][1] == 0]
        denominator = sum(weights[name] * len(sequences[name].rows) for name in mixed_ids)
        for name in step:
            terms = self._terms(sequences[name], reference, means)
            total = total + weights[name] * terms.sum() / denominator
        return total

    def _terms(self, sequence: Sequence64, reference: Float64Model, means: Means) -> torch.Tensor:
        """Return coef · (e^x - x - 1) - entropy_coef · H of each token, x = log π_ref - log π."""
        logprob, entropy = self._logprobs(sequence)
        with torch.no_grad():
            reference_logprob, _ = self._logprobs(sequence, model=reference)
        log_ratio = reference_logprob - logprob
        kl = log_ratio.exp() - log_ratio - 1
        means.add("policy/kl_reference", kl.detach())
        means.add("policy/current_entropy", entropy.detach())
        return self.algo.kl.coef * kl - self.algo.entropy_coef * entropy

    def _count(self, tokens: torch.Tensor) -> int:
        """Return what a sequence adds to the denominator: 1 for ESPO, else its tokens."""
        return 1 if isinstance(self.algo, EspoSettings) else len(tokens)

    def _logprobs(
        self,
        sequence: Sequence64,
        means: Means | None = None,
        model: Float64Model | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logprob, entropy) of the trained tokens. model: None for the trained one."""
        logits, num_different = (model or self.model).logits(sequence.inputs, sequence.routes)
        logp = (logits[sequence.rows] / self.temperature).log_softmax(-1)
        if means is not None and sequence.routes is not None:
            num_rows = sequence.routes[..., 0].numel()
            means.add("mismatch/route_disagreement", float(num_different), num_rows)
        return logp.gather(-1, sequence.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def _old_values(self, sequence: Sequence64, means: Means) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, entropy = self._logprobs(sequence, means)
        log_w = logprob - sequence.rollout_logprobs
        limited_log_w = log_w.clamp(-10, 10)
        means.add("policy/entropy", entropy)
        means.add("mismatch/logprob_abs_mean", log_w.abs())
        means.add("mismatch/k3_kl", limited_log_w.exp() - 1 - limited_log_w)
        return logprob, entropy

    def _objective(
        self,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        entropy: torch.Tensor,
        advantages: torch.Tensor,
        means: Means,
    ) -> torch.Tensor:
        """Return the objective of the sequence for ESPO, and of each token for the others."""
        if isinstance(self.algo, CispoSettings):
            ratio = (logprob - old_logprob).exp().detach()
            return _cispo_weights(ratio, self.algo, means) * advantages * logprob
        if isinstance(self.algo, GrpoSettings):
            ratio = (logprob - old_logprob).exp()
            return _clip(ratio, advantages, self.algo.clip_low, self.algo.clip_high, means)
        assert isinstance(self.algo, EspoSettings)
        return self._espo_objective(self.algo, logprob, old_logprob, entropy, advantages, means)

    def _espo_objective(
        self,
        algo: EspoSettings,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        entropy: torch.Tensor,
        advantages: torch.Tensor,
        means: Means,
    ) -> torch.Tensor:
        parts = []
        for group in _entropy_groups(entropy, algo.fractions[0]):
            max_entropy = math.log(self.model.config["vocab_size"])
            width = algo.alpha * float(entropy[group].mean()) / max_entropy
            width = max(algo.min_clip, width)
            group_ratio = (logprob - old_logprob)[group].mean().exp().detach()
            ratio = group_ratio * (logprob[group] - logprob[group].detach()).exp()
            parts.append(_clip(ratio, advantages[group], width, width, means).mean())
            means.add("policy/epsilon_mean", width)
        return torch.stack(parts).mean()

    def _update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clip by the global norm and apply AdamW."""
        step = len(self.rates) + 1
        rate = self._rate(step)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        scale = min(1.0, self.optimizer.clip_grad / (norm + 1e-6))
        self.grad_norms.append(norm)
        self.rates.append(rate)
        for name, gradient in zip(self.model.weights, gradients, strict=True):
            self._update_weight(name, scale * gradient, rate, step)

    def _update_weight(self, name: str, gradient: torch.Tensor, rate: float, step: int) -> None:
        settings = self.optimizer
        weight = self.model.weights[name]
        mean, square = self._moments[name]
        mean.mul_(settings.beta1).add_((1 - settings.beta1) * gradient)
        square.mul_(settings.beta2).add_((1 - settings.beta2) * gradient**2)
        direction = mean / (1 - settings.beta1**step)
        direction = direction / ((square / (1 - settings.beta2**step)).sqrt() + settings.eps)
        decay = settings.weight_decay if weight.ndim >= _MIN_DIMENSIONS_TO_DECAY else 0.0
        with torch.no_grad():
            weight.sub_(rate * (direction + decay * weight))

    def _rate(self, step: int) -> float:
        """Return the rate: linear warm-up from 0, then linear decay until `total_steps`."""
        settings = self.optimizer
        if step <= settings.warmup_steps:
            return settings.lr * step / settings.warmup_steps
        remaining = (self.total_steps - step) / (self.total_steps - settings.warmup_steps)
        return settings.lr * (0.1 + 0.9 * remaining)


def _entropy_groups(entropy: torch.Tensor, fraction: float) -> list[list[int]]:
    """Return the tokens of the highest entropies, and the other tokens."""
    count = max(1, math.ceil(fraction * len(entropy)))
    by_entropy = sorted(range(len(entropy)), key=lambda t: (-float(entropy[t]), t))
    return [sorted(group) for group in (by_entropy[:count], by_entropy[count:]) if group]


def _token_advantages(
    advantage: float, alpha: float, entropies: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return w A for all tokens, or w α H_t, or -w |α| (max H - H_t), [T].

    The latter two are at most w. advantage: w A.
    """
    if alpha == 0:
        return torch.full_like(entropies, advantage)
    values = alpha * entropies if alpha > 0 else alpha * (entropies.max() - entropies)
    return weight * values.clamp(-1, 1)


def _cispo_weights(ratio: torch.Tensor, algo: CispoSettings, means: Means) -> torch.Tensor:
    """Return clip(r, 1 - clip_low, 1 + clip_high) of each token."""
    low = 1 - algo.clip_low
    high = 1 + algo.clip_high
    means.add("policy/clip_fraction_low", (ratio < low).double())
    means.add("policy/clip_fraction_high", (ratio > high).double())
    means.add("policy/ratio_mean", ratio)
    return ratio.clamp(low, high)


def _clip(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, means: Means
) -> torch.Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) of each token."""
    is_clipped_low = (ratio < 1 - low) & (advantages < 0)
    is_clipped_high = (ratio > 1 + high) & (advantages > 0)
    means.add("policy/clip_fraction_low", is_clipped_low.double())
    means.add("policy/clip_fraction_high", is_clipped_high.double())
    means.add("policy/ratio_mean", ratio.detach())
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
