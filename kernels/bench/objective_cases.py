"""espo_groups and espo_policy_loss at rollout size, beside an eager torch version of the same
objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.implementation import BenchmarkCase, Implementation, Run
from espo_kernels import EspoGroups, espo_groups, espo_policy_loss

VOCABULARY = 151_936


def objective_cases(device: torch.device, sequences: int, longest: int) -> Iterator[BenchmarkCase]:
    """Grouping, and loss with gradient, of `sequences` responses of up to `longest` tokens."""
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 4, longest + 1, (sequences,), generator=rng)
    lengths[0] = longest
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(device)
    tokens = int(lengths.sum())
    old = -torch.rand(tokens, device=device)
    new = (old + 0.01 * torch.randn(tokens, device=device)).requires_grad_()
    entropies = torch.rand(tokens, device=device) ** 4
    advantages = torch.randn(sequences, device=device).repeat_interleave(lengths.to(device))
    groups = espo_groups(entropies, cu_seqlens, vocab_size=VOCABULARY, min_clip=3e-4)
    shape = f"{sequences} sequences, {tokens} tokens"
    common: dict[str, Any] = {"shape": shape, "dtype": "float32", "input_bytes": entropies.nbytes}

    def group() -> list[torch.Tensor]:
        result = espo_groups(entropies, cu_seqlens, vocab_size=VOCABULARY, min_clip=3e-4)
        return [result.clip, result.count]

    def group_reference() -> list[torch.Tensor]:
        result = espo_groups(
            entropies, cu_seqlens, vocab_size=VOCABULARY, min_clip=3e-4, backend="reference"
        )
        return [result.clip, result.count]

    yield BenchmarkCase(
        "espo_groups",
        "grouping",
        bytes_moved=entropies.nbytes + tokens,
        implementations=(
            Implementation("espo_kernels", group),
            Implementation("reference", group_reference),
        ),
        **common,
    )
    yield BenchmarkCase(
        "espo_policy_loss",
        "loss + gradient",
        bytes_moved=13 * tokens + 4 * tokens,
        implementations=(
            Implementation("espo_kernels", _loss(new, old, advantages, cu_seqlens, groups)),
            Implementation("eager", _eager_loss(new, old, advantages, cu_seqlens, groups)),
        ),
        **common,
    )


def _loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    groups: EspoGroups,
) -> Run:
    sequences = cu_seqlens.numel() - 1

    def run() -> tuple[torch.Tensor, ...]:
        loss, _ = espo_policy_loss(
            new, old, advantages, cu_seqlens, groups, num_sequences=sequences
        )
        return (loss.detach(), *torch.autograd.grad(loss, new))

    return run


def _eager_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    groups: EspoGroups,
) -> Run:
    sequences, K = groups.clip.shape
    tokens = new.numel()

    def run() -> tuple[torch.Tensor, ...]:
        sequence = torch.repeat_interleave(
            torch.arange(sequences, device=new.device), cu_seqlens.diff(), output_size=tokens
        )
        segment = sequence * K + groups.group_id.long()
        size = groups.count.flatten().to(new.dtype)
        delta = (new - old).detach()
        mean = torch.zeros_like(size).index_add_(0, segment, delta) / size.clamp_min(1)
        s = mean.exp()[segment] * torch.exp(new - new.detach())
        eps = groups.clip.flatten()[segment]
        terms = torch.minimum(s * advantages, s.clamp(1 - eps, 1 + eps) * advantages)
        weight = (
            1 / (size.view(sequences, K) * (size.view(sequences, K) > 0).sum(1, keepdim=True))
        ).flatten()
        loss = -(terms * weight[segment]).sum() / sequences
        return (loss.detach(), *torch.autograd.grad(loss, new))

    return run
