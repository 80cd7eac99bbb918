"""Chooses the experts of one router under replay, in forward passes and in recomputation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_rl.contracts.exit_codes import ExitCode, Failure

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# replay: use the recorded experts. record: use the router's own choice and record it. live: use the
# router's own choice, which can be compared with the recorded experts.
Routing = Literal["replay", "record", "live"]
# Expert ids below this number fit into uint8.
_UINT8_EXPERTS = 256


@dataclass(frozen=True)
class _Pass:
    """The routing of one pass over micro-batches. See `RouterTarget.activate`."""

    routing: Routing
    measure: bool
    forward_only: bool


@dataclass
class _Forward:
    """The forward pass of one micro-batch. See `RouterTarget.begin_forward`.

    calls: how often the router ran in it.
    """

    batch: int
    experts: torch.Tensor | None
    real_rows: torch.Tensor | None
    calls: int = 0


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
        self.disagreement = torch.zeros(2, dtype=torch.int64)
        self.load = torch.zeros(0, dtype=torch.int64)
        self._pending: deque[tuple[int, torch.Tensor]] = deque()
        self._recomputation_counts: Counter[int] = Counter()
        self._pass: _Pass | None = None
        self._forward: _Forward | None = None

    def activate(self, routing: Routing, *, measure: bool, forward_only: bool) -> None:
        """Begin a pass over micro-batches.

        measure: count `disagreement` and `load`.
        forward_only: True for a pass without gradients, in which nothing is recomputed.
        """
        self._pass = _Pass(routing, measure, forward_only)
        self._forward = None
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
        self._forward = _Forward(batch, experts, real_rows)
        if self._pass is None or not self._pass.forward_only:
            self._recomputation_counts[batch] += 0

    def end_forward(self) -> None:
        """End the forward pass. Further calls recompute micro-batches, the oldest first."""
        forward = self._forward
        calls = 0 if forward is None else forward.calls
        if calls != 1:
            batch = None if forward is None else forward.batch
            self._add_fault(batch, f"its router ran {calls} times in one forward pass, not once")
        self._forward = None

    def deactivate(self) -> None:
        """End the pass, check that it was complete, and drop its routes."""
        if self._forward is not None:
            self._add_fault(self._forward.batch, "its forward pass began but did not end")
        for batch, count in self._recomputation_counts.items():
            if count != self._recomputations:
                self._add_fault(
                    batch, f"its router was recomputed {count} times, not {self._recomputations}"
                )
        self._pending.clear()
        self._recomputation_counts.clear()
        self._forward = None
        self._pass = None

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
            # Megatron sorts the experts only in a mode with gradients: see seams.py.
            with torch.enable_grad():
                return default_compute_topk(
                    scores, topk, num_groups=num_groups, group_topk=group_topk
                )

        if self._pass is None:
            return choose(scores)
        routing = self._pass.routing
        recorded_experts = self._next_experts(self._pass, scores, topk)
        if routing == "replay" and recorded_experts is not None:
            choice = scores.gather(1, recorded_experts), recorded_experts
        else:
            choice = choose(scores)
        experts = choice[1]
        forward = self._forward
        if forward is None:
            return choice
        if routing == "record":
            self.recordings[forward.batch] = _narrow(experts.detach(), scores.shape[1])
        if self._pass.measure:
            live_experts = experts if routing != "replay" else choose(scores.detach())[1]
            is_real = _real_mask(experts, forward.real_rows)
            self._count_load(experts, is_real, scores.shape[1])
            if recorded_experts is not None:
                self._count_disagreement(live_experts, recorded_experts, is_real)
        return choice

    def _next_experts(
        self, current_pass: _Pass, scores: torch.Tensor, topk: int
    ) -> torch.Tensor | None:
        """Return the recorded experts of this call as int64 indices [rows, topk].

        None means that there are none, which is a fault if they should be replayed.
        """
        if self._forward is not None:
            batch = self._forward.batch
            experts = self._forward.experts
            self._count_call(self._forward, current_pass)
        elif self._pending:
            batch, experts = self._pending.popleft()
            self._recomputation_counts[batch] += 1
        else:
            self._add_fault(None, "its router ran without routes for its micro-batch")
            return None
        if experts is None:
            if current_pass.routing == "replay":
                self._add_fault(batch, "there are no routes for it")
            return None
        if experts.shape != (scores.shape[0], topk):
            self._add_fault(
                batch,
                f"routes of shape {tuple(experts.shape)} for {scores.shape[0]} rows and top-{topk}",
            )
            return None
        return experts.to(device=scores.device, dtype=torch.int64)

    def _count_call(self, forward: _Forward, current_pass: _Pass) -> None:
        """Count a call within a forward pass, and queue its experts for recomputation.

        Activation checkpointing runs the forward pass without gradients, and again with gradients
        in the backward pass.
        """
        forward.calls += 1
        is_recomputed_later = not current_pass.forward_only and not torch.is_grad_enabled()
        if forward.experts is not None and is_recomputed_later:
            self._pending.append((forward.batch, forward.experts))

    def _count_load(self, experts: torch.Tensor, is_real: torch.Tensor, num_experts: int) -> None:
        load = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
        weights = is_real.to(torch.int64).repeat_interleave(experts.shape[1])
        load = load.scatter_add(0, experts.flatten(), weights)
        self.load = load if len(self.load) == 0 else self.load.to(load.device) + load

    def _count_disagreement(
        self, live_experts: torch.Tensor, recorded_experts: torch.Tensor, is_real: torch.Tensor
    ) -> None:
        differs = (live_experts.sort(-1).values != recorded_experts.sort(-1).values).any(-1)
        counts = torch.stack([(differs & is_real).sum(), is_real.sum()])
        if self.disagreement.device == counts.device:
            counts = counts + self.disagreement
        self.disagreement = counts  # the first zeros are on the host, whose copy would wait

    def _add_fault(self, batch: int | None, description: str) -> None:
        place = f"layer {self.layer}"
        if batch is not None:
            place += f", micro-batch {batch}"
        self.faults.append(f"{place}: {description}")


def _real_mask(experts: torch.Tensor, real_rows: torch.Tensor | None) -> torch.Tensor:
    """Return bool [rows], False for padding."""
    if real_rows is None:
        return torch.ones(len(experts), dtype=torch.bool, device=experts.device)
    return real_rows.to(experts.device)


def _narrow(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    return experts.to(torch.uint8 if num_experts <= _UINT8_EXPERTS else torch.uint16)
