"""Chooses the experts of one router under replay, in forward passes and in recomputation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import torch

from megatron_rl.contracts.exit_codes import ExitCode, Failure

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# replay: use the recorded experts. record: use the router's own choice and record it. live: use the
# router's own choice, which can be compared with the recorded experts.
Routing = Literal["replay", "record", "live"]
# Expert ids below this number fit into uint8.
_UINT8_EXPERTS = 256


class RouterTarget:
    """The experts that one router must use. Megatron's router calls `get_replay_topk`.

    No error raises during a pass, because the other ranks would wait for this one. The router uses
    its own choice instead, `faults` describes the error, and all ranks drop the step together.

    The measurements stay on the router's device, and nothing waits for them.

    layer: the decoder layer of the router, counted from 0, for messages.
    recomputations: how often each forward pass with gradients is recomputed.

    Attributes:
    faults: descriptions of errors, one for each.
    recordings: the experts [rows, topk] of a recording pass by micro-batch, uint8 up to 256
        experts and else uint16.
    disagreement: int64 [2] of a measured pass: rows whose own top-k set differs from the recorded
        one, and all rows that were compared.
    load: int64 [experts] of a measured pass: the rows that each expert got.
    """

    def __init__(self, layer: int = 0, recomputations: int = 0) -> None:
        self.layer = layer
        self._recomputations = recomputations
        self.faults: list[str] = []
        self.recordings: dict[int, torch.Tensor] = {}
        self._pending: deque[tuple[int, torch.Tensor]] = deque()
        self._recomputation_counts: Counter[int] = Counter()
        self._batch: int | None = None
        self._experts: torch.Tensor | None = None
        self._real_rows: torch.Tensor | None = None
        self.activate("live", measure=False, forward_only=False)
        self._active = False

    def activate(self, routing: Routing, *, measure: bool, forward_only: bool) -> None:
        """Begin a pass over micro-batches.

        measure: count `disagreement` and `load`.
        forward_only: True for a pass without gradients, in which nothing is recomputed.
        """
        self._active = True
        self._routing = routing
        self._measure = measure
        self._forward_only = forward_only
        self._calls = 0
        self._close_batch()
        self.disagreement = torch.zeros(2, dtype=torch.int64)
        self.load = torch.zeros(0, dtype=torch.int64)

    def begin_forward(
        self, batch: int, experts: torch.Tensor | None, real_rows: torch.Tensor | None
    ) -> None:
        """Begin the forward pass of a micro-batch.

        batch: the index of the micro-batch in the pass.
        experts: the recorded experts [rows, topk]; None if the router chooses.
        real_rows: bool [rows], False for padding; None if no row is padding.
        """
        self._batch = batch
        self._experts = experts
        self._real_rows = real_rows
        self._calls = 0
        if not self._forward_only:
            self._recomputation_counts[batch] += 0

    def end_forward(self) -> None:
        """End the forward pass. Further calls recompute micro-batches, the oldest first."""
        if self._calls != 1:
            self._add_fault(
                self._batch, f"its router ran {self._calls} times in one forward pass, not once"
            )
        self._close_batch()

    def deactivate(self) -> None:
        """End the pass, check that it was complete, and drop its routes."""
        if self._batch is not None:
            self._add_fault(self._batch, "its forward pass began but did not end")
        for batch, count in self._recomputation_counts.items():
            if count != self._recomputations:
                self._add_fault(
                    batch, f"its router was recomputed {count} times, not {self._recomputations}"
                )
        self._pending.clear()
        self._recomputation_counts.clear()
        self._close_batch()
        self._active = False

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of every row. Megatron's router calls this.

        scores: [rows, experts].
        num_groups, group_topk: for group-limited routing, passed on to `default_compute_topk`.
        default_compute_topk: the router's own choice.

        Returns the scores of the chosen experts and the experts, both [rows, topk]. Raises
        `Failure` without `default_compute_topk`.
        """
        if default_compute_topk is None:
            raise Failure(
                "the router passed no top-k function: this Megatron-Core version is not supported",
                ExitCode.SYNC_MISMATCH,
            )

        def choose(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        if not self._active:
            return choose(scores)
        recorded_experts = self._next_experts(scores, topk)
        if self._routing == "replay" and recorded_experts is not None:
            choice = scores.gather(1, recorded_experts), recorded_experts
        else:
            choice = choose(scores)
        experts = choice[1]
        if self._batch is not None and self._routing == "record":
            self.recordings[self._batch] = _narrow(experts.detach(), scores.shape[1])
        if self._batch is not None and self._measure:
            live_experts = experts if self._routing != "replay" else choose(scores.detach())[1]
            self._count_load(experts, scores.shape[1])
            if recorded_experts is not None:
                self._count_disagreement(live_experts, recorded_experts)
        return choice

    def _next_experts(self, scores: torch.Tensor, topk: int) -> torch.Tensor | None:
        """Return the recorded experts of this call as int64 indices [rows, topk].

        None means that there are none, which is a fault if they should be replayed.
        """
        if self._batch is not None:
            batch, experts = self._begin_call(self._batch)
        elif self._pending:
            batch, experts = self._pending.popleft()
            self._recomputation_counts[batch] += 1
        else:
            self._add_fault(None, "its router ran without routes for its micro-batch")
            return None
        if experts is None:
            if self._routing == "replay":
                self._add_fault(batch, "there are no routes for it")
            return None
        if experts.shape != (scores.shape[0], topk):
            self._add_fault(
                batch,
                f"routes of shape {tuple(experts.shape)} for {scores.shape[0]} rows and top-{topk}",
            )
            return None
        return experts.to(device=scores.device, dtype=torch.int64)

    def _begin_call(self, batch: int) -> tuple[int, torch.Tensor | None]:
        """Count a call within a forward pass, and queue its experts for recomputation.

        Activation checkpointing runs the forward pass without gradients, and again with gradients
        in the backward pass.
        """
        self._calls += 1
        is_recomputed_later = not self._forward_only and not torch.is_grad_enabled()
        if self._experts is not None and is_recomputed_later:
            self._pending.append((batch, self._experts))
        return batch, self._experts

    def _count_load(self, experts: torch.Tensor, num_experts: int) -> None:
        load = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
        weights = self._real_mask(experts).to(torch.int64).repeat_interleave(experts.shape[1])
        load = load.scatter_add(0, experts.flatten(), weights)
        self.load = load if len(self.load) == 0 else self.load.to(load.device) + load

    def _count_disagreement(
        self, live_experts: torch.Tensor, recorded_experts: torch.Tensor
    ) -> None:
        is_real = self._real_mask(live_experts)
        differs = (live_experts.sort(-1).values != recorded_experts.sort(-1).values).any(-1)
        counts = torch.stack([(differs & is_real).sum(), is_real.sum()])
        if self.disagreement.device == counts.device:
            counts = counts + self.disagreement
        self.disagreement = counts  # the first zeros are on the host, whose copy would wait

    def _real_mask(self, experts: torch.Tensor) -> torch.Tensor:
        """Return bool [rows], False for padding."""
        if self._real_rows is None:
            return torch.ones(len(experts), dtype=torch.bool, device=experts.device)
        return self._real_rows.to(experts.device)

    def _close_batch(self) -> None:
        self._batch = None
        self._experts = None
        self._real_rows = None

    def _add_fault(self, batch: int | None, description: str) -> None:
        place = f"layer {self.layer}"
        if batch is not None:
            place += f", micro-batch {batch}"
        self.faults.append(f"{place}: {description}")


def _narrow(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    return experts.to(torch.uint8 if num_experts <= _UINT8_EXPERTS else torch.uint16)
