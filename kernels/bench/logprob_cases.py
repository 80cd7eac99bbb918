"""token_logprob_entropy beside eager torch, torch.compile, TRL, verl and Liger-Kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.implementation import BenchmarkCase, Goal, Implementation, Run
from bench.peers import Peer, liger_cross_entropy, torch_compile, trl_pair, verl_pair
from espo_kernels import token_logprob_entropy

Pair = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def eager_pair(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = logits.float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def logprob_cases(
    device: torch.device,
    rows: int,
    vocabulary: int,
    dtypes: list[torch.dtype],
    *,
    with_peers: bool = True,
) -> Iterator[BenchmarkCase]:
    """Forward, and forward with the gradient of the logprobs, for each dtype."""
    peers = _peer_pairs(device) if with_peers else []
    liger = liger_cross_entropy(device) if with_peers else Peer("Liger-Kernel", None)
    pairs: dict[str, Pair] = {"espo_kernels": token_logprob_entropy, "eager": eager_pair}
    pairs |= {peer.name: peer.function for peer in peers if peer.function is not None}
    absent = {peer.name: peer.reason for peer in (*peers, liger) if peer.function is None}
    for dtype in dtypes:
        logits = torch.randn(rows, vocabulary, device=device).mul_(3).to(dtype)
        targets = torch.randint(vocabulary, (rows,), device=device)
        common: dict[str, Any] = {
            "operation": "token_logprob_entropy",
            "shape": f"{rows} × {vocabulary}",
            "dtype": str(dtype).removeprefix("torch."),
            "input_bytes": logits.nbytes,
            "absent": absent,
            "goal": Goal(least_of_copy=0.9),
        }
        yield BenchmarkCase(
            part="forward",
            bytes_moved=logits.nbytes,
            implementations=_forward_implementations(pairs, logits, targets),
            **common,
        )
        leaf = logits.requires_grad_()
        yield BenchmarkCase(
            part="forward + backward",
            bytes_moved=3 * logits.nbytes,
            implementations=tuple(_gradient_implementations(pairs, liger, leaf, targets)),
            **common,
        )


def _peer_pairs(device: torch.device) -> list[Peer]:
    return [torch_compile(eager_pair, device), trl_pair(), verl_pair()]


def _forward_implementations(
    pairs: dict[str, Pair], logits: torch.Tensor, targets: torch.Tensor
) -> tuple[Implementation, ...]:
    return tuple(
        Implementation(name, _forward(pair, logits, targets)) for name, pair in pairs.items()
    )


def _gradient_implementations(
    pairs: dict[str, Pair], liger: Peer, leaf: torch.Tensor, targets: torch.Tensor
) -> list[Implementation]:
    implementations = [
        Implementation(name, _with_gradient(pair, leaf, targets)) for name, pair in pairs.items()
    ]
    implementations.append(Implementation("espo_kernels, in place", _in_place(leaf, targets)))
    if liger.function is not None:
        run = _liger(liger.function, leaf, targets)
        note = "no entropy; gradient in place"
        implementations.append(Implementation(liger.name, run, compare=False, note=note))
    return implementations


def _forward(pair: Pair, logits: torch.Tensor, targets: torch.Tensor) -> Run:
    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return pair(logits, targets)

    return run


def _with_gradient(pair: Pair, logits: torch.Tensor, targets: torch.Tensor) -> Run:
    ones = torch.ones(len(targets), device=targets.device)

    def run() -> tuple[torch.Tensor, ...]:
        logprob, _ = pair(logits, targets)
        return torch.autograd.grad(logprob, logits, ones.to(logprob.dtype))

    return run


def _in_place(logits: torch.Tensor, targets: torch.Tensor) -> Run:
    """Run over the logits, which the first run replaces by their gradient.

    Repeated runs shrink them towards 0, which does not change the time.
    """
    ones = torch.ones(len(targets), device=targets.device)

    def run() -> tuple[torch.Tensor, ...]:
        leaf = logits.detach().requires_grad_()
        logprob, _ = token_logprob_entropy(leaf, targets, inplace_backward=True)
        return torch.autograd.grad(logprob, leaf, ones)

    return run


def _liger(cross_entropy: Callable[..., Any], logits: torch.Tensor, targets: torch.Tensor) -> Run:
    """Run over the logits, as `_in_place` does."""

    def run() -> tuple[torch.Tensor, ...]:
        leaf = logits.detach().requires_grad_()
        return (cross_entropy(leaf, targets, reduction="sum"),)

    return run
