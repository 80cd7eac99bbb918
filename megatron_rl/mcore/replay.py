"""Route replay: Megatron's routers use recorded experts, in forward, in recomputation and so in
backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.mcore.router_target import ReplayError, RouterTarget, Routing

_SHOWN_FAULTS = 8


class RouteReplay:
    """Replays routes through the routers of one rank's model chunks.

    source: who records them: the engines, at rollout (R3, arXiv 2510.11370), or these routers, in
    the old-policy pass (R2, arXiv 2507.18071, 5.3).
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], source: Literal["rollout", "trainer"] = "rollout"
    ) -> None:
        self.source = source
        self._targets: list[list[RouterTarget]] = []
        for model in models:
            routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
            chunk = []
            for router in sorted(routers, key=lambda r: r.layer_number or 0):
                _refuse_unreplayable(router.config)
                router.router_replay = RouterTarget(
                    (router.layer_number or 1) - 1, _recomputations(router.config)
                )
                chunk.append(router.router_replay)
            self._targets.append(chunk)

    @property
    def _every(self) -> list[RouterTarget]:
        return [target for chunk in self._targets for target in chunk]

    def require_layers(self, layers: Sequence[int]) -> None:
        """Raise `ReplayError` unless the routers are of these decoder layers, from 0, in this
        order, as routes are.
        """
        found = [target.layer for target in self._every]
        if found != list(layers):
            raise ReplayError(
                f"train.replay={self.source}: this rank's routers are of the decoder layers {found}, its routes of "
                f"{list(layers)}: this Megatron-Core splits pipeline stages otherwise than models/pipeline_split.py. "
                "Use another grid, or train.replay=off"
            )

    @property
    def first_pass(self) -> Routing:
        """What the routers do in the old-policy pass."""
        return "record" if self.source == "trainer" else "replay"

    @contextlib.contextmanager
    def active(
        self, routing: Routing = "replay", *, measure: bool = False, forward_only: bool = False
    ) -> Iterator[None]:
        """Replay within; on leaving, everything but what was recorded and measured is forgotten."""
        for target in self._every:
            target.activate(routing, measure=measure, forward_only=forward_only)
        try:
            yield
        finally:
            for target in self._every:
                target.deactivate()

    @contextlib.contextmanager
    def forward(
        self,
        chunk: int,
        batch: int,
        routes: torch.Tensor | None,
        real_rows: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """One micro-batch's forward through model `chunk`. routes [rows, MoE layers of this rank,
        topk].

        batch: its place in the pass. real_rows bool [rows] leaves padding out of what is measured.
        routes None: there is nothing to replay, or to compare with. Only shapes are checked here:
        expert ids were, by `contracts.routes`, where the routes entered.
        """
        first = sum(len(targets) for targets in self._targets[:chunk])
        targets, total = self._targets[chunk], len(self._every)
        if routes is not None and targets and (routes.ndim != 3 or routes.shape[1] != total):
            shape = tuple(routes.shape)
            targets[0].faults.append(
                f"micro-batch {batch}: routes of shape {shape}, not [rows, {total} layers, topk]"
            )
            routes = None
        for layer, target in enumerate(targets):
            target.begin_forward(
                batch, None if routes is None else routes[:, first + layer], real_rows
            )
        yield
        for target in targets:
            target.end_forward()

    def take_recorded(self, num_batches: int) -> list[torch.Tensor | None]:
        """What the last recording pass recorded, by micro-batch: [rows, MoE layers of this rank,
        topk], narrow.

        None on a pipeline stage without experts, and where a router recorded nothing, which is a
        fault.
        """
        kept = [(target, target.recorded) for target in self._every]
        for target, recorded in kept:
            target.recorded = {}
            lost = [batch for batch in range(num_batches) if batch not in recorded]
            target.faults += [
                f"layer {target.layer}, micro-batch {batch}: its router recorded nothing"
                for batch in lost
            ]
        return [
            torch.stack([recorded[batch] for _, recorded in kept], dim=1)
            if kept and all(batch in recorded for _, recorded in kept)
            else None
            for batch in range(num_batches)
        ]

    @property
    def faulty(self) -> bool:
        """Whether routes were not replayed as recorded, on this rank, since `take_faults`."""
        return any(target.faults for target in self._every)

    def take_faults(self) -> str:
        """What was wrong since the last call, empty where nothing was; the first few, with their
        layers and counts.
        """
        found = [fault for target in self._every for fault in target.faults]
        for target in self._every:
            target.faults = []
        more = f"; and {len(found) - _SHOWN_FAULTS} more" if len(found) > _SHOWN_FAULTS else ""
        return "; ".join(found[:_SHOWN_FAULTS]) + more

    def disagreement(self) -> tuple[int, int]:
        """(row-layers whose live choice differed from the given one, row-layers) of the last
        measured pass.
        """
        counts = self.layer_disagreement().values()
        return sum(differing for differing, _ in counts), sum(rows for _, rows in counts)

    def layer_disagreement(self) -> dict[int, tuple[int, int]]:
        """`disagreement` of each of this rank's decoder layers with experts, counted from 0."""
        if not self._every:  # a pipeline stage without experts
            return {}
        counts = torch.stack(
            [target.disagreement for target in self._every]
        ).tolist()  # the only transfer of a pass
        return {
            target.layer: (differing, rows)
            for target, (differing, rows) in zip(self._every, counts, strict=True)
        }

    def layer_load(self) -> dict[int, list[int]]:
        """How many rows each expert got in the last measured pass, by decoder layer, counted from
        0.
        """
        return {target.layer: target.load.tolist() for target in self._every}


def _recomputations(config: Any) -> int:
    """How often a router runs again in the backward pass: with its layer, or with its experts
    (`moe`), once.
    """
    modules = config.recompute_modules or ()
    again = config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in modules
    )
    return int(again)


def _refuse_unreplayable(config: Any) -> None:
    """Raise `ReplayError` for Megatron's router settings that ignore replay silently, or change the
    choice after it.
    """
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
        "moe_aux_loss_coeff": (
            bool(config.moe_aux_loss_coeff),
            "the auxiliary loss uses the live choice",
        ),
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
            raise ReplayError(
                f"{key}={getattr(config, key)!r}: {why}; switch it off or set train.replay=off"
            )
