"""Route replay: Megatron's routers use the experts the engine used, in forward, in recomputation and so in backward."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class ReplayError(RuntimeError):
    """Routes do not fit the model or the batch, or were left over; replaying would be silently wrong."""


class RouterTarget:
    """What one router shall do; Megatron's router asks it through `get_replay_topk`.

    disagreement int64 [2] counts (rows whose live top-k set differs from the target's, rows) while measuring.
    """

    def __init__(self) -> None:
        self._target: torch.Tensor | None = None
        self._real_rows: torch.Tensor | None = None
        self._pending: deque[torch.Tensor] = deque()
        self._recomputed = 0
        self._active = False
        self._measure = False
        self._forward_only = False
        self.disagreement = torch.zeros(2, dtype=torch.int64)

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
        if self._real_rows is not None:
            differs = differs[self._real_rows.to(differs.device)]
        self.disagreement += torch.stack([differs.sum(), differs.new_tensor(differs.numel(), dtype=torch.int64)]).cpu()


class RouteReplay:
    """Replays routes through the routers of one rank's model chunks."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._targets: list[list[RouterTarget]] = []
        self._num_experts = 0
        for model in models:
            routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
            chunk = []
            for router in sorted(routers, key=lambda r: r.layer_number or 0):
                refuse_unreplayable(router.config)
                self._num_experts = router.config.num_moe_experts
                router.router_replay = RouterTarget()
                chunk.append(router.router_replay)
            self._targets.append(chunk)

    @contextlib.contextmanager
    def active(self, *, measure: bool = False, forward_only: bool = False) -> Iterator[None]:
        """Replay within; on leaving, everything is forgotten. Raises `ReplayError` for leftovers."""
        every = [target for chunk in self._targets for target in chunk]
        for target in every:
            target.activate(measure=measure, forward_only=forward_only)
        try:
            yield
        except BaseException:
            for target in every:
                target.deactivate()
            raise
        problems = [f"router {i}: {what}" for i, t in enumerate(every) if (what := t.deactivate()) is not None]
        if problems:
            raise ReplayError(
                "routes were left over, the next step would replay the wrong ones: " + "; ".join(problems)
            )

    @contextlib.contextmanager
    def forward(self, chunk: int, routes: torch.Tensor | None, real_rows: torch.Tensor | None = None) -> Iterator[None]:
        """Force `routes` [rows, MoE layers of this rank, topk] during one micro-batch's forward through model `chunk`.

        real_rows bool [rows] leaves padding out of the disagreement. routes None: live routing.
        """
        if routes is None:
            yield
            return
        first = sum(len(targets) for targets in self._targets[:chunk])
        targets = self._targets[chunk]
        total = sum(len(t) for t in self._targets)
        if routes.ndim != 3 or routes.shape[1] != total:
            raise ReplayError(f"routes of shape {tuple(routes.shape)}: expected [rows, {total} MoE layers, topk]")
        _check_experts(routes, self._num_experts)
        for layer, target in enumerate(targets):
            target.begin_forward(routes[:, first + layer], real_rows)
        yield
        for target in targets:
            target.end_forward()

    def disagreement(self) -> tuple[int, int]:
        """(row-layers whose live choice differed from the replayed one, row-layers) of the last measured pass."""
        total = sum((t.disagreement for chunk in self._targets for t in chunk), torch.zeros(2, dtype=torch.int64))
        return int(total[0]), int(total[1])


def _check_experts(routes: torch.Tensor, num_experts: int) -> None:
    """Raise `ReplayError` unless every row names existing, different experts; Megatron runs repeated ones silently."""
    ids = routes.to(torch.int32).sort(dim=-1).values  # uint16 has few operations
    bad = (ids < 0).any(-1) | (ids >= num_experts).any(-1) | (ids[..., 1:] == ids[..., :-1]).any(-1)
    if bool(bad.any()):
        row, layer = bad.nonzero()[0].tolist()
        raise ReplayError(
            f"routes[{row}, {layer}] = {routes[row, layer].tolist()}: experts are different and in [0, {num_experts}); "
            f"{int(bad.sum())} of {bad.numel()} rows are wrong, reject the sample they came with"
        )


def refuse_unreplayable(config: Any) -> None:
    """Raise `ReplayError` for router settings that ignore replay silently, or change the choice after it."""
    rules = {
        "moe_router_fusion": (bool(config.moe_router_fusion), "the fused router ignores replay"),
        "moe_router_load_balancing_type": (
            "sinkhorn" in str(config.moe_router_load_balancing_type),
            "sinkhorn routing ignores replay",
        ),
        "moe_expert_capacity_factor": (
            config.moe_expert_capacity_factor is not None,
            "capacity dropping changes the choice after replay",
        ),
        "moe_aux_loss_coeff": (bool(config.moe_aux_loss_coeff), "the auxiliary loss uses the live choice"),
        "moe_router_enable_expert_bias": (
            bool(config.moe_router_enable_expert_bias),
            "the expert bias moves with routing maps",
        ),
        "moe_router_force_load_balancing": (
            bool(config.moe_router_force_load_balancing),
            "forced balancing makes the scores random",
        ),
    }
    for key, (broken, why) in rules.items():
        if broken:
            raise ReplayError(f"{key}={getattr(config, key)!r}: {why}; switch it off or set train.replay_routes=false")
