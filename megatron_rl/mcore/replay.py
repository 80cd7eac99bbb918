"""Route replay: Megatron's routers use the experts the engine used, in forward, in recomputation and so in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.mcore.router_target import ReplayError, RouterTarget


class RouteReplay:
    """Replays routes through the routers of one rank's model chunks."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._targets: list[list[RouterTarget]] = []
        for model in models:
            routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
            chunk = []
            for router in sorted(routers, key=lambda r: r.layer_number or 0):
                _refuse_unreplayable(router.config)
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

        real_rows bool [rows] leaves padding out of the disagreement. routes None: live routing. Only shapes are checked
        here: expert ids were, by `contracts.routes`, where the routes entered.
        """
        if routes is None:
            yield
            return
        first = sum(len(targets) for targets in self._targets[:chunk])
        targets = self._targets[chunk]
        total = sum(len(t) for t in self._targets)
        if routes.ndim != 3 or routes.shape[1] != total:
            raise ReplayError(f"routes of shape {tuple(routes.shape)}: expected [rows, {total} MoE layers, topk]")
        for layer, target in enumerate(targets):
            target.begin_forward(routes[:, first + layer], real_rows)
        yield
        for target in targets:
            target.end_forward()

    def disagreement(self) -> tuple[int, int]:
        """(row-layers whose live choice differed from the replayed one, row-layers) of the last measured pass."""
        counts = [target.disagreement for chunk in self._targets for target in chunk]
        if not counts:  # a pipeline stage without experts
            return 0, 0
        differing, rows = torch.stack(counts).sum(0).tolist()  # the only transfer of a pass
        return differing, rows


def _refuse_unreplayable(config: Any) -> None:
    """Raise `ReplayError` for Megatron's router settings that ignore replay silently, or change the choice after it."""
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
        "moe_router_bias_update_rate": (
            bool(config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate),
            "the expert bias would move with the replayed choice; it must stay frozen",
        ),
        "moe_router_force_load_balancing": (
            bool(config.moe_router_force_load_balancing),
            "forced balancing makes the scores random",
        ),
    }
    for key, (broken, why) in rules.items():
        if broken:
            raise ReplayError(f"{key}={getattr(config, key)!r}: {why}; switch it off or set train.replay_routes=false")
