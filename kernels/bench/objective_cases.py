"""espo_groups and espo_policy_loss at rollout size, beside the same objective in eager torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bench.implementation import BenchmarkCase, Goal, Implementation, Run
from espo_kernels import EspoGroups, espo_groups, espo_policy_loss
from espo_kernels.backends import Backend

VOCABULARY = 151_936


class _Rollouts(NamedTuple):
    """Packed responses: [T] tensors, and cu_seqlens [B + 1]."""

    cu_seqlens: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    entropies: torch.Tensor
    advantages: torch.Tensor


def objective_cases(device: torch.device, sequences: int, longest: int) -> Iterator[BenchmarkCase]:
    """Grouping, and loss with gradient, of `sequences` responses of up to `longest` tokens."""
    rollouts = _random_rollouts(device, sequences, longest)
    tokens = rollouts.entropies.numel()
    groups = _groups(rollouts, "auto")
    common: dict[str, Any] = {
        "shape": f"{sequences} sequences, {tokens} tokens",
        "dtype": "float32",
        "input_bytes": rollouts.entropies.nbytes,
    }
    yield BenchmarkCase(
        "espo_groups",
        "grouping",
        bytes_moved=rollouts.entropies.nbytes + tokens,
        implementations=(
            Implementation("espo_kernels", _grouping(rollouts, "auto")),
            Implementation("reference", _grouping(rollouts, "reference")),
        ),
        goal=Goal(most_us=150),
        **common,
    )
    yield BenchmarkCase(
        "espo_policy_loss",
        "loss + gradient",
        bytes_moved=13 * tokens + 4 * tokens,
        implementations=(
            Implementation("espo_kernels", _loss(rollouts, groups)),
            Implementation("eager", _eager_loss(rollouts, groups)),
        ),
        goal=Goal(most_us=50),
        **common,
    )


def _random_rollouts(device: torch.device, sequences: int, longest: int) -> _Rollouts:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 4, longest + 1, (sequences,), generator=rng)
    lengths[0] = longest
    tokens = int(lengths.sum())
    old = -torch.rand(tokens, device=device)
    return _Rollouts(
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(device),
        old=old,
        new=(old + 0.01 * torch.randn(tokens, device=device)).requires_grad_(),
        entropies=torch.rand(tokens, device=device) ** 4,
        advantages=torch.randn(sequences).repeat_interleave(lengths).to(device),
    )


def _groups(rollouts: _Rollouts, backend: Backend) -> EspoGroups:
    return espo_groups(
        rollouts.entropies,
        rollouts.cu_seqlens,
        vocab_size=VOCABULARY,
        min_clip=3e-4,
        backend=backend,
    )


def _grouping(rollouts: _Rollouts, backend: Backend) -> Run:
    def run() -> list[torch.Tensor]:
        groups = _groups(rollouts, backend)
        return [groups.clip, groups.count]

    return run


def _loss(rollouts: _Rollouts, groups: EspoGroups) -> Run:
    cu_seqlens, old, new, _, advantages = rollouts
    sequences = cu_seqlens.numel() - 1

    def run() -> tuple[torch.Tensor, ...]:
        loss, _ = espo_policy_loss(
            new, old, advantages, cu_seqlens, groups, num_sequences=sequences
        )
        return (loss.detach(), *torch.autograd.grad(loss, new))

    return run


def _eager_loss(rollouts: _Rollouts, groups: EspoGroups) -> Run:
    cu_seqlens, old, new, _, advantages = rollouts
    sequences, K = groups.clip.shape
    tokens = new.numel()

    def run() -> tuple[torch.Tensor, ...]:
        sequence = torch.repeat_interleave(
            torch.arange(sequences, device=new.device), cu_seqlens.diff(), output_size=tokens
        )
        segment = sequence * K + groups.group_id.long()
        size = groups.count.to(new.dtype)
        s = _eager_ratio(new, old, segment, size)
        eps = groups.clip.flatten()[segment]
        terms = torch.minimum(s * advantages, s.clamp(1 - eps, 1 + eps) * advantages)
        weight = 1 / (size * (size > 0).sum(1, keepdim=True))
        loss = -(terms * weight.flatten()[segment]).sum() / sequences
        return (loss.detach(), *torch.autograd.grad(loss, new))

    return run


def _eager_ratio(
    new: torch.Tensor, old: torch.Tensor, segment: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """s_t [T]: the group's ratio, with a gradient through the token. segment: its group, [T]."""
    delta = (new - old).detach()
    sums = torch.zeros_like(size.flatten()).index_add_(0, segment, delta)
    mean = sums / size.flatten().clamp_min(1)
    return mean.exp()[segment] * torch.exp(new - new.detach())
