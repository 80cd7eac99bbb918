"""Whole training steps in float64, written from the formulas: advantages, GRPO, ESPO, clipping,
schedule, AdamW.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.config.algorithms import AlgoSettings, EspoSettings, GrpoSettings
from megatron_rl.config.schema import OptimizerSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.rollout import Rollout
from tests.support.float64_model import Float64Model

_NO_DECAY_BELOW = 2  # dimensions: the weights of norms are not decayed


def advantages_of(groups: Sequence[Group]) -> dict[str, float]:
    """A = (c - mean) / (std + 1e-6) by rollout, c its correctness of 0 or 1, std over n - 1; with x
    = clip(c - reward): A (1 - x / 2) where c is 1, A (1 + x / 2) where it is 0. Without a verdict
    or a difference in correctness: none.
    """
    found: dict[str, float] = {}
    for group in groups:
        judged = [r for r in group.rollouts if r.verdict.reward is not None]
        if len({r.verdict.correctness for r in judged}) > 1:
            scores = torch.tensor([r.verdict.correctness for r in judged], dtype=torch.float64)
            below = (
                scores - torch.tensor([r.verdict.reward for r in judged], dtype=torch.float64)
            ).clamp(0, 1)
            centred = scores - scores.mean()
            std = (centred.square().sum() / (len(judged) - 1)).sqrt()
            factors = 1 + torch.where(scores == 1, -0.5, 0.5) * below
            found |= dict(
                zip(
                    [r.rollout_id for r in judged],
                    (factors * centred / (std + 1e-6)).tolist(),
                    strict=True,
                )
            )
    return found


def entropy_advantages_of(groups: Sequence[Group], alpha: float) -> dict[str, float]:
    """α by rollout of an all-right group, -α of an all-wrong one; all have a verdict."""
    found: dict[str, float] = {}
    for group in groups:
        scores = {r.verdict.correctness for r in group.rollouts}
        if len(scores) == 1:
            found |= dict.fromkeys(
                [r.rollout_id for r in group.rollouts], alpha if scores == {1.0} else -alpha
            )
    return found


@dataclass(frozen=True)
class Sequence64:
    """One rollout as the model reads it: inputs [n], routes [n, layers, top-k]; `rows` are trained
    on `targets`.
    """

    inputs: torch.Tensor
    routes: torch.Tensor | None
    rows: torch.Tensor
    targets: torch.Tensor
    sampled: torch.Tensor

    @classmethod
    def of(cls, rollout: Rollout) -> "Sequence64":
        tokens, trained, sampled = [], [], []
        for segment in rollout.segments:
            tokens += segment.tokens.tolist()
            trained += [segment.trainable] * len(segment.tokens)
            sampled += (
                [0.0] * len(segment.tokens)
                if segment.logprobs is None
                else segment.logprobs.tolist()
            )
        rows = [i - 1 for i in range(1, len(tokens)) if trained[i]]
        return cls(
            inputs=torch.tensor(tokens[:-1]),
            routes=None if rollout.routes is None else torch.tensor(rollout.routes.tolist()),
            rows=torch.tensor(rows),
            targets=torch.tensor([tokens[i + 1] for i in rows]),
            sampled=torch.tensor([sampled[i + 1] for i in rows], dtype=torch.float64),
        )


@dataclass
class Means:
    """Sums and weights of what the trainer reports as means."""

    totals: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, values: torch.Tensor | float, weight: float | None = None) -> None:
        values = torch.as_tensor(values, dtype=torch.float64)
        pair = self.totals.setdefault(name, [0.0, 0.0])
        pair[0] += float(values.sum())
        pair[1] += values.numel() if weight is None else weight

    def values(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.totals.items()}


@dataclass
class Float64Trainer:
    """Trains a model step by step. grad_norms, rates: of every optimizer step so far."""

    model: Float64Model
    algo: AlgoSettings
    optimizer: OptimizerSettings
    total_steps: int
    temperature: float
    grad_norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._moments = {
            name: (torch.zeros_like(w), torch.zeros_like(w))
            for name, w in self.model.weights.items()
        }

    def train(
        self,
        steps: Sequence[Sequence[str]],
        rollouts: Mapping[str, Rollout],
        advantages: Mapping[str, tuple[float, float]],
    ) -> dict[str, float]:
        """One rollout batch: the old policy once, then an optimizer step for each list of rollouts.
        Returns metrics.

        advantages: of mixed groups (A, 0), of flat ones (0, ±α), which are in no denominator.
        """
        means = Means()
        sequences = {name: Sequence64.of(rollouts[name]) for step in steps for name in step}
        with torch.no_grad():
            old = {name: self._old(sequence, means) for name, sequence in sequences.items()}
        for step in steps:
            counted = [name for name in step if advantages[name][1] == 0]
            tokens = sum(len(sequences[name].rows) for name in counted)
            total = torch.zeros((), dtype=torch.float64)
            for name in step:
                logprob, _ = self._logprobs(sequences[name])
                each = _per_token(*advantages[name], old[name][1])
                means.add(f"policy/advantage_{'mixed' if name in counted else 'flat'}", each.abs())
                objective = self._objective(logprob, *old[name], each, means)
                per_token = isinstance(self.algo, GrpoSettings)
                total = total - (
                    objective.sum() / tokens if per_token else objective / len(counted)
                )
            means.add("train/loss", total.detach())
            self._update(
                torch.autograd.grad(
                    total, list(self.model.weights.values()), materialize_grads=True
                )
            )
            means.add("train/grad_norm", self.grad_norms[-1])
        return means.values() | {"train/lr": self.rates[-1]}

    def _logprobs(
        self, sequence: Sequence64, means: Means | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, differing = self.model.logits(sequence.inputs, sequence.routes)
        logp = (logits[sequence.rows] / self.temperature).log_softmax(-1)
        if means is not None and sequence.routes is not None:
            means.add(
                "mismatch/route_disagreement", float(differing), sequence.routes[..., 0].numel()
            )
        return logp.gather(-1, sequence.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def _old(self, sequence: Sequence64, means: Means) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, entropy = self._logprobs(sequence, means)
        log_w = logprob - sequence.sampled
        means.add("policy/entropy", entropy)
        means.add("mismatch/logprob_abs_mean", log_w.abs())
        means.add("mismatch/k3_kl", log_w.clamp(-10, 10).exp() - 1 - log_w.clamp(-10, 10))
        return logprob, entropy

    def _objective(
        self,
        logprob: torch.Tensor,
        old: torch.Tensor,
        entropy: torch.Tensor,
        advantages: torch.Tensor,
        means: Means,
    ) -> torch.Tensor:
        """GRPO: of each token. ESPO: of the sequence."""
        if isinstance(self.algo, GrpoSettings):
            ratio = (logprob - old).exp()
            return _clipped(ratio, advantages, self.algo.clip_low, self.algo.clip_high, means)
        assert isinstance(self.algo, EspoSettings)
        count = max(1, math.ceil(self.algo.fractions[0] * len(old)))
        by_entropy = sorted(range(len(old)), key=lambda t: (-float(entropy[t]), t))
        groups = [sorted(g) for g in (by_entropy[:count], by_entropy[count:]) if g]
        parts = []
        for group in groups:
            width = (
                self.algo.alpha
                * float(entropy[group].mean())
                / math.log(self.model.config["vocab_size"])
            )
            width = max(self.algo.min_clip, width)
            ratio = (logprob - old)[group].mean().exp().detach() * (
                logprob[group] - logprob[group].detach()
            ).exp()
            parts.append(_clipped(ratio, advantages[group], width, width, means).mean())
            means.add("policy/epsilon_mean", width)
        return torch.stack(parts).mean()

    def _update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Global-norm clipping and AdamW."""
        settings, step = self.optimizer, len(self.rates) + 1
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        rate, scale = self._rate(step), min(1.0, settings.clip_grad / (norm + 1e-6))
        self.grad_norms.append(norm)
        self.rates.append(rate)
        for (name, weight), gradient in zip(self.model.weights.items(), gradients, strict=True):
            mean, square = self._moments[name]
            mean.mul_(settings.beta1).add_((1 - settings.beta1) * scale * gradient)
            square.mul_(settings.beta2).add_((1 - settings.beta2) * (scale * gradient) ** 2)
            direction = mean / (1 - settings.beta1**step)
            direction = direction / ((square / (1 - settings.beta2**step)).sqrt() + settings.eps)
            with torch.no_grad():
                decay = settings.weight_decay if weight.ndim >= _NO_DECAY_BELOW else 0.0
                weight.sub_(rate * (direction + decay * weight))

    def _rate(self, step: int) -> float:
        """Linear warm-up from 0, then linear decay to min_lr_ratio at `total_steps`."""
        settings = self.optimizer
        if step <= settings.warmup_steps:
            return settings.lr * step / settings.warmup_steps
        left = (self.total_steps - step) / (self.total_steps - settings.warmup_steps)
        return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def _per_token(advantage: float, alpha: float, entropies: torch.Tensor) -> torch.Tensor:
    """[T]: A for all tokens, or α H_t, or -|α| (max H - H_t); the latter two at most 1."""
    if alpha == 0:
        return torch.full_like(entropies, advantage)
    return (alpha * entropies if alpha > 0 else alpha * (entropies.max() - entropies)).clamp(-1, 1)


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, means: Means
) -> torch.Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A) of each token."""
    for name, cut in (
        ("low", (ratio < 1 - low) & (advantages < 0)),
        ("high", (ratio > 1 + high) & (advantages > 0)),
    ):
        means.add(f"policy/clip_fraction_{name}", cut.double())
    means.add("policy/ratio_mean", ratio.detach())
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
