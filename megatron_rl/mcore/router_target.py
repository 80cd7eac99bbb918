"""What one router shall do under replay, in forward and in recomputation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class ReplayError(RuntimeError):
    """Routes do not fit the model or the batch, or were left over; replaying would be silently wrong."""


class RouterTarget:
    """The experts one router shall use; Megatron's router asks it through `get_replay_topk`.

    disagreement int64 [2] counts (rows whose live top-k set differs from the target's, rows) while measuring, on the
    routers' device: counting waits for nothing.
    """

    def __init__(self) -> None:
        self._target: torch.Tensor | None = None
        self._real_rows: torch.Tensor | None = None
        self._pending: deque[torch.Tensor] = deque()
        self._recomputed = 0
        self.activate(measure=False, forward_only=False)
        self._active = False

    def activate(self, *, measure: bool, forward_only: bool) -> None:
        self._active, self._measure, self._forward_only = True, measure, forward_only
        self.disagreement = torch.zeros(2, dtype=torch.int64)

    def begin_forward(self, experts: torch.Tensor, real_rows: torch.Tensor | None) -> None:
        self._target, self._real_rows = experts, real_rows

    def end_forward(self) -> None:
        """The forward pass is over: further calls recompute micro-batches, oldest first."""
        if self._target is None:
            raise ReplayError("end_forward without begin_forward")
        self._target = None

    def deactivate(self) -> str | None:
        """Forget everything; returns what was wrong with the state, if anything."""
        waiting, recomputed, open_target = len(self._pending), self._recomputed, self._target is not None
        self._target, self._real_rows, self._active = None, None, False
        self._pending.clear()
        self._recomputed = 0
        if open_target:
            return "a forward pass was begun and never ended"
        if waiting:
            return f"{recomputed} micro-batches were recomputed and {waiting} were not"
        return None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the router with scores [rows, experts]; returns (scores of the experts, experts) [rows, topk]."""
        if default_compute_topk is None:
            raise ReplayError("the router passed no top-k function: this Megatron-Core version is not supported")
        if not self._active:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._next_experts(scores, topk)
        if self._measure and self._target is not None:
            live = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)[1]
            self._count_disagreement(live, experts)
        return scores.gather(1, experts), experts

    def _next_experts(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        if self._target is not None:
            experts = self._target
            # activation checkpointing runs the forward without gradients and again, with them, in the backward pass
            if not self._forward_only and not torch.is_grad_enabled():
                self._pending.append(experts)
        elif self._pending:
            experts = self._pending.popleft()
            self._recomputed += 1
        else:
            raise ReplayError("a router ran under replay without routes for its micro-batch")
        if experts.shape != (scores.shape[0], topk):
            raise ReplayError(f"routes of shape {tuple(experts.shape)} for {scores.shape[0]} rows and top-{topk}")
        return experts.to(device=scores.device, dtype=torch.int64)

    def _count_disagreement(self, live: torch.Tensor, experts: torch.Tensor) -> None:
        differs = (live.sort(-1).values != experts.sort(-1).values).any(-1)
        real = torch.ones_like(differs) if self._real_rows is None else self._real_rows.to(differs.device)
        self.disagreement = self.disagreement.to(differs.device) + torch.stack([(differs & real).sum(), real.sum()])
