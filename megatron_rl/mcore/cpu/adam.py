"""AdamW with the state layout that Megatron's distributed optimizer expects of a fused Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedLayoutAdam(torch.optim.Optimizer):
    """Decoupled weight decay (AdamW, arXiv 1711.05101) when adam_w_mode, L2 regularisation
    otherwise.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.adam_w_mode = int(adam_w_mode)

    def initialize_state(self, param: torch.Tensor, *_: Any) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param].setdefault(name, torch.zeros_like(param, dtype=torch.float32))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **_: Any) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError(
                "closures are not supported: Megatron computes gradients before the step"
            )
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for param in params:
                self.initialize_state(param)
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        grads = [p.grad.float() for p in params if p.grad is not None]
        mean = [self.state[p]["exp_avg"] for p in params]
        square = [self.state[p]["exp_avg_sq"] for p in params]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, [p.float() for p in params], alpha=decay))
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, grads, grads, 1 - beta2)
        denominator = torch._foreach_div(square, 1 - beta2**step)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, mean, denominator, -lr / (1 - beta1**step))
