"""AdamW with the state layout that Megatron's distributed optimizer expects of a fused Adam.

It serves CPUs, and GPUs without Transformer Engine and Apex.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class _Piece(NamedTuple):
    """A part of a parameter with its gradient and moments."""

    param: torch.Tensor
    grad: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor


class FusedLayoutAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (AdamW, arXiv 1711.05101), or with L2 regularisation.

    With gradient g at step t and learning rate lr::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p * (1 - lr * weight_decay)
        p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    The state of a parameter holds m as "exp_avg" and v as "exp_avg_sq", both float32 of the
    parameter's shape. The count of steps t is in the parameter group, as "step".

    params: tensors or parameter groups, as `torch.optim.Optimizer` takes them.
    adam_w_mode: False adds weight_decay * p to g instead of scaling p.
    chunk_elements: the temporary tensors of an update have at most this many elements. A multiple
        of the width of vector instructions, because the elements after the last full vector may be
        rounded differently.
    Further arguments of fused Adams are accepted and ignored.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        chunk_elements: int = 2**24,
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.adam_w_mode = int(adam_w_mode)
        self._chunk_elements = chunk_elements

    def initialize_state(self, param: torch.Tensor, *_: Any) -> None:
        """Add zero moments to the state of a parameter that has none."""
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param].setdefault(name, torch.zeros_like(param, dtype=torch.float32))

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **_: Any
    ) -> None:
        """Update every parameter that has a gradient. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError(
                "closures are not supported: Megatron computes gradients before the step"
            )
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            pieces = [
                piece
                for param in group["params"]
                if param.grad is not None
                for piece in self._pieces(param, param.grad)
            ]
            for chunk in _chunks(pieces, self._chunk_elements):
                self._update(group, chunk)

    def _pieces(self, param: torch.Tensor, grad: torch.Tensor) -> Iterable[_Piece]:
        """Split a parameter of contiguous tensors into pieces of at most a chunk's elements."""
        self.initialize_state(param)
        state = self.state[param]
        whole = _Piece(param, grad, state["exp_avg"], state["exp_avg_sq"])
        if param.numel() <= self._chunk_elements or not all(t.is_contiguous() for t in whole):
            return [whole]
        parts = [tensor.detach().view(-1).split(self._chunk_elements) for tensor in whole]
        return map(_Piece, *parts)

    def _update(self, group: dict[str, Any], pieces: Sequence[_Piece]) -> None:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        weight_decay = group["weight_decay"]
        step = group["step"]
        params = [piece.param for piece in pieces]
        grads = [piece.grad.float() for piece in pieces]
        mean = [piece.mean for piece in pieces]
        square = [piece.square for piece in pieces]
        if weight_decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * weight_decay)
        elif weight_decay:
            grads = list(torch._foreach_add(grads, [p.float() for p in params], alpha=weight_decay))
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, grads, grads, 1 - beta2)
        denominator = torch._foreach_div(square, 1 - beta2**step)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, mean, denominator, -lr / (1 - beta1**step))


def _chunks(pieces: Iterable[_Piece], max_elements: int) -> Iterator[list[_Piece]]:
    """Group pieces in their order into chunks of at most `max_elements`, or of one piece."""
    chunk: list[_Piece] = []
    size = 0
    for piece in pieces:
        if chunk and size + piece.param.numel() > max_elements:
            yield chunk
            chunk = []
            size = 0
        chunk.append(piece)
        size += piece.param.numel()
    if chunk:
        yield chunk
