"""Route replay: Megatron's routers use recorded experts.

Recomputation uses the same experts, and so does the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.mcore.router_target import RouterTarget, Routing

# The faults that a message lists. It counts the others.
_MAX_FAULTS_IN_MESSAGE = 8


class RouteReplay:
    """Replays routes through the routers of this rank's model chunks.

    source: where routes come from. "rollout": the engines record them during generation (R3,
        arXiv 2510.11370). "trainer": these routers record them in the old-policy pass (R2,
        arXiv 2507.18071, section 5.3).

    Raises `Failure` for a Megatron setting under which routers ignore replay.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], source: Literal["rollout", "trainer"] = "rollout"
    ) -> None:
        self.source = source
        self._targets = [_install_targets(model) for model in models]

    @property
    def _all_targets(self) -> list[RouterTarget]:
        return [target for chunk in self._targets for target in chunk]

    def require_layers(self, layers: Sequence[int]) -> None:
        """Check that this rank's routers are of these decoder layers, counted from 0, in order.

        Raises `Failure` otherwise.
        """
        router_layers = [target.layer for target in self._all_targets]
        if router_layers != list(layers):
            raise Failure(
                f"train.replay={self.source}: this rank's routers are of the decoder layers "
                f"{router_layers}, but its routes are of {list(layers)}. This Megatron-Core splits "
                "pipeline stages differently from models/pipeline_split.py. Use another grid, or "
                "train.replay=off",
                ExitCode.SYNC_MISMATCH,
            )

    @property
    def old_policy_routing(self) -> Routing:
        """The routing of the old-policy pass: "record" if the trainer records, else "replay"."""
        return "record" if self.source == "trainer" else "replay"

    @contextlib.contextmanager
    def active(
        self, routing: Routing = "replay", *, measure: bool = False, forward_only: bool = False
    ) -> Iterator[None]:
        """Control the routers within one pass. Recordings, measurements and faults outlive it.

        measure: compare the routers' own choices with the routes, and count each expert's rows.
        forward_only: True for a pass without gradients.
        """
        for target in self._all_targets:
            target.activate(routing, measure=measure, forward_only=forward_only)
        try:
            yield
        finally:
            for target in self._all_targets:
                target.deactivate()

    @contextlib.contextmanager
    def forward(
        self,
        chunk: int,
        batch: int,
        routes: torch.Tensor | None,
        real_rows: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """Control the routers within the forward pass of one micro-batch through one model chunk.

        Only shapes are checked here. `contracts.routes` checked the expert ids where the routes
        entered.

        chunk: the index of the model chunk.
        batch: the index of the micro-batch in the pass.
        routes: [rows, MoE layers of this rank, topk]; None if there is nothing to replay or to
            compare with.
        real_rows: bool [rows], False for padding, which is not measured; None if no row is padding.
        """
        first = sum(len(targets) for targets in self._targets[:chunk])
        targets = self._targets[chunk]
        total = len(self._all_targets)
        if routes is not None and targets and (routes.ndim != 3 or routes.shape[1] != total):
            targets[0].faults.append(
                f"micro-batch {batch}: routes of shape {tuple(routes.shape)}, "
                f"not [rows, {total} layers, topk]"
            )
            routes = None
        for layer, target in enumerate(targets):
            experts = None if routes is None else routes[:, first + layer]
            target.begin_forward(batch, experts, real_rows)
        yield
        for target in targets:
            target.end_forward()

    def take_recorded_routes(self, num_batches: int) -> list[torch.Tensor | None]:
        """Return and drop the routes of the last recording pass, one entry for each micro-batch.

        Each entry is [rows, MoE layers of this rank, topk], uint8 or uint16. It is None on a
        pipeline stage without experts, and where a router recorded nothing, which is a fault.
        """
        recordings = []
        for target in self._all_targets:
            recordings.append(target.recordings)
            target.faults += [
                f"layer {target.layer}, micro-batch {batch}: its router recorded nothing"
                for batch in range(num_batches)
                if batch not in target.recordings
            ]
            target.recordings = {}
        return [_stack_layers(recordings, batch) for batch in range(num_batches)]

    @property
    def has_faults(self) -> bool:
        """True if this rank failed to replay or record a route since the last `take_faults`."""
        return any(target.faults for target in self._all_targets)

    def take_faults(self) -> str:
        """Describe and drop the faults since the last call; empty without faults.

        The text lists the first eight with their layers and micro-batches, and counts the others.
        """
        faults = [fault for target in self._all_targets for fault in target.faults]
        for target in self._all_targets:
            target.faults = []
        text = "; ".join(faults[:_MAX_FAULTS_IN_MESSAGE])
        if len(faults) > _MAX_FAULTS_IN_MESSAGE:
            text += f"; and {len(faults) - _MAX_FAULTS_IN_MESSAGE} more"
        return text

    def disagreement(self) -> tuple[int, int]:
        """Count the disagreement of the last measured pass over this rank's layers.

        Returns the rows whose own choice of experts differs from the recorded one, and all rows
        that were compared. A row counts once in each layer.
        """
        counts = self.layer_disagreement().values()
        return sum(differing for differing, _ in counts), sum(rows for _, rows in counts)

    def layer_disagreement(self) -> dict[int, tuple[int, int]]:
        """Return `disagreement` of each decoder layer with experts, counted from 0."""
        if not self._all_targets:  # a pipeline stage without experts
            return {}
        # The only transfer from the GPU of a measured pass.
        counts = torch.stack([target.disagreement for target in self._all_targets]).tolist()
        return {
            target.layer: (differing, rows)
            for target, (differing, rows) in zip(self._all_targets, counts, strict=True)
        }

    def layer_load(self) -> dict[int, list[int]]:
        """Return the rows that each expert got in the last measured pass, by decoder layer.

        Layers are counted from 0.
        """
        return {target.layer: target.load.tolist() for target in self._all_targets}


def _install_targets(model: torch.nn.Module) -> list[RouterTarget]:
    """Give every router of a model chunk a target, and return the targets in order of layers."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    targets = []
    for router in sorted(routers, key=lambda r: r.layer_number or 0):
        _require_replayable(router.config)
        layer = (router.layer_number or 1) - 1
        router.router_replay = RouterTarget(layer, _recomputations(router.config))
        targets.append(router.router_replay)
    return targets


def _stack_layers(recordings: Sequence[dict[int, torch.Tensor]], batch: int) -> torch.Tensor | None:
    """Stack the recorded experts of one micro-batch over layers; None if a layer lacks them."""
    if not recordings or any(batch not in experts for experts in recordings):
        return None
    return torch.stack([experts[batch] for experts in recordings], dim=1)


def _recomputations(config: Any) -> int:
    """Return how often a router runs again in the backward pass: 0 or 1.

    It runs again with its layer, or with its experts (`moe` in the recomputed modules).
    """
    modules = config.recompute_modules or ()
    is_selected = config.recompute_granularity == "selective" and "moe" in modules
    return int(config.recompute_granularity == "full" or is_selected)


def _require_replayable(config: Any) -> None:
    """Raise `Failure` for router settings of Megatron that replay cannot control.

    Under these settings routers ignore replay silently, or change the choice after it.
    """
    has_moving_bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    has_sinkhorn = "sinkhorn" in str(config.moe_router_load_balancing_type)
    rules = {
        "moe_router_fusion": (config.moe_router_fusion, "the fused router ignores replay"),
        "moe_router_load_balancing_type": (has_sinkhorn, "sinkhorn routing ignores replay"),
        "moe_expert_capacity_factor": (
            config.moe_expert_capacity_factor is not None,
            "capacity dropping changes the choice after replay",
        ),
        "moe_aux_loss_coeff": (
            config.moe_aux_loss_coeff,
            "the auxiliary loss uses the live choice",
        ),
        "moe_router_bias_update_rate": (
            has_moving_bias,
            "the expert bias would move with the replayed choice; it must stay frozen",
        ),
        "moe_router_force_load_balancing": (
            config.moe_router_force_load_balancing,
            "forced balancing makes the scores random",
        ),
    }
    for key, (is_violated, reason) in rules.items():
        if is_violated:
            raise Failure(
                f"{key}={getattr(config, key)!r}: {reason}. Switch it off, or set train.replay=off",
                ExitCode.SYNC_MISMATCH,
            )
