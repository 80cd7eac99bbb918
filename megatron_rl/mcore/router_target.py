"""What one router shall do under replay, in forward and in recomputation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import torch

from megatron_rl.contracts.exit_codes import ExitCode, Failure

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# replay: use the given experts; record: choose, and keep the choice; live: choose, beside the given
# experts
Routing = Literal["replay", "record", "live"]
_UINT8_EXPERTS = 256


class ReplayError(Failure):
    """Routes cannot be replayed through this model, or were not replayed as recorded."""

    exit_code = ExitCode.SYNC_MISMATCH


class RouterTarget:
    """The experts one router shall use; Megatron's router asks it through `get_replay_topk`.

    Nothing in a pass raises: a rank that left it alone would leave the others waiting. The router
    then chooses by itself, `faults` says what was wrong, and all ranks drop the step together.

    layer: its decoder layer, counted from 0, for messages. recomputations: of each forward pass
    with gradients, by the model's settings. While measuring, on the router's device and without
    waiting for it: disagreement int64 [2] counts (rows whose live top-k set differs from the given
    one, rows), load int64 [experts] the rows that each expert got. recorded: the choices [rows,
    topk] of a pass that records, uint8 or uint16, by micro-batch.
    """

    def __init__(self, layer: int = 0, recomputations: int = 0) -> None:
        self.layer, self._recomputations = layer, recomputations
        self.faults: list[str] = []
        self.recorded: dict[int, torch.Tensor] = {}
        self._pending: deque[tuple[int, torch.Tensor]] = deque()
        self._recomputed: Counter[int] = Counter()
        self.activate("live", measure=False, forward_only=False)
        self._active = False

    def activate(self, routing: Routing, *, measure: bool, forward_only: bool) -> None:
        """Begin a pass. forward_only: without gradients, so that nothing is recomputed."""
        self._active, self._routing, self._measure, self._forward_only = (
            True,
            routing,
            measure,
            forward_only,
        )
        self._open: int | None = None
        self._target: torch.Tensor | None = None
        self._real_rows: torch.Tensor | None = None
        self._asked = 0
        self.disagreement = torch.zeros(2, dtype=torch.int64)
        self.load = torch.zeros(0, dtype=torch.int64)

    def begin_forward(
        self, batch: int, experts: torch.Tensor | None, real_rows: torch.Tensor | None
    ) -> None:
        """Micro-batch `batch` comes. experts [rows, topk] may be None where the router chooses."""
        self._open, self._target, self._real_rows, self._asked = batch, experts, real_rows, 0
        if not self._forward_only:
            self._recomputed[batch] += 0

    def end_forward(self) -> None:
        """The forward pass is over: further calls recompute micro-batches, oldest first."""
        if self._asked != 1:
            self._fault(
                self._open, f"its router ran {self._asked} times in one forward pass, not once"
            )
        self._open = self._target = self._real_rows = None

    def deactivate(self) -> None:
        """End the pass, and forget its routes; `faults` tells what was left over."""
        if self._open is not None:
            self._fault(self._open, "its forward pass was begun and never ended")
        for batch, count in self._recomputed.items():
            if count != self._recomputations:
                self._fault(
                    batch, f"its router was recomputed {count} times, not {self._recomputations}"
                )
        self._pending.clear()
        self._recomputed.clear()
        self._open = self._target = self._real_rows = None
        self._active = False

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the router with scores [rows, experts]; returns (scores of the experts,
        experts) [rows, topk].
        """
        if default_compute_topk is None:
            raise ReplayError(
                "the router passed no top-k function: this Megatron-Core version is not supported"
            )

        def live(of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return default_compute_topk(of, topk, num_groups=num_groups, group_topk=group_topk)

        if not self._active:
            return live(scores)
        forced = self._next_experts(scores, topk)
        if self._routing == "replay" and forced is not None:
            chosen = scores.gather(1, forced), forced
        else:
            chosen = live(scores)
        if self._open is not None:
            if self._routing == "record":
                self.recorded[self._open] = _narrow(chosen[1].detach(), scores.shape[1])
            if self._measure:
                own = chosen[1] if self._routing != "replay" else live(scores.detach())[1]
                self._count(own, forced, chosen[1], scores.shape[1])
        return chosen

    def _next_experts(self, scores: torch.Tensor, topk: int) -> torch.Tensor | None:
        """The given experts as indices; None where there are none, which is a fault if they were to
        be replayed.
        """
        if self._open is not None:
            self._asked += 1
            batch, experts = self._open, self._target
            # activation checkpointing runs the forward without gradients and again, with them, in
            # the backward pass
            if experts is not None and not self._forward_only and not torch.is_grad_enabled():
                self._pending.append((batch, experts))
        elif self._pending:
            batch, experts = self._pending.popleft()
            self._recomputed[batch] += 1
        else:
            self._fault(None, "its router ran without routes for its micro-batch")
            return None
        if experts is None:
            if self._routing == "replay":
                self._fault(batch, "there are no routes for it")
            return None
        if experts.shape != (scores.shape[0], topk):
            self._fault(
                batch,
                f"routes of shape {tuple(experts.shape)} for {scores.shape[0]} rows and top-{topk}",
            )
            return None
        return experts.to(device=scores.device, dtype=torch.int64)

    def _count(
        self, own: torch.Tensor, given: torch.Tensor | None, used: torch.Tensor, num_experts: int
    ) -> None:
        real = torch.ones(len(used), dtype=torch.bool, device=used.device)
        real = real if self._real_rows is None else self._real_rows.to(used.device)
        load = torch.zeros(num_experts, dtype=torch.int64, device=used.device)
        load = load.scatter_add(
            0, used.flatten(), real.to(torch.int64).repeat_interleave(used.shape[1])
        )
        self.load = load if len(self.load) == 0 else self.load.to(load.device) + load
        if given is not None:
            differs = (own.sort(-1).values != given.sort(-1).values).any(-1)
            self.disagreement = self.disagreement.to(differs.device) + torch.stack(
                [(differs & real).sum(), real.sum()]
            )

    def _fault(self, batch: int | None, what: str) -> None:
        where = f"layer {self.layer}" + ("" if batch is None else f", micro-batch {batch}")
        self.faults.append(f"{where}: {what}")


def _narrow(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    return experts.to(torch.uint8 if num_experts <= _UINT8_EXPERTS else torch.uint16)
