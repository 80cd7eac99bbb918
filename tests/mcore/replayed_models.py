"""A tiny model of one rank with route replay, and one pass over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.models.families import read_shape
from tests.support.packed_sequences import pack, targets_of

MICRO_BATCHES = [(0, 1, 2), (3, 4)]


def build(
    checkpoint: Path,
    recompute: Literal["none", "selective", "full"] = "none",
    *,
    modules: list[Any] | None = None,
    dtype: Any = "float32",
    **overrides: Any,
) -> Any:
    """Return one rank's DDP models with the checkpoint's weights, and their replay.

    modules: `model.recompute_modules`.
    overrides: attributes of Megatron's configuration.
    """
    from megatron_rl.mcore.model import build_models
    from megatron_rl.mcore.optimizer import wrap_data_parallel
    from megatron_rl.mcore.replay import RouteReplay
    from megatron_rl.mcore.weights import load_hf_weights

    shape = read_shape(checkpoint)
    settings = ModelSettings(
        path=str(checkpoint), recompute=recompute, recompute_modules=modules, dtype=dtype
    )
    models = build_models(shape, settings, ParallelSettings())
    load_hf_weights(models, shape, checkpoint)
    for name, value in overrides.items():
        setattr(models[0].config, name, value)
    return list(wrap_data_parallel(models)), RouteReplay(models)


def routers(models: list[Any]) -> list[Any]:
    """Return the routers of the models in order of layers."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [m for model in models for m in model.modules() if isinstance(m, TopKRouter)]


def train_pass(models: list[Any], replay: Any) -> dict[str, torch.Tensor]:
    """Run the micro-batches forward and backward; returns the gradients by parameter name."""
    from megatron_rl.mcore.schedule import run_schedule

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        value = torch.nn.functional.cross_entropy(
            logits, targets_of(MICRO_BATCHES[index]), reduction="sum"
        )
        return value / 50, None

    models[0].zero_grad_buffer()
    batches = [pack(sequences, range(3)) for sequences in MICRO_BATCHES]
    run_schedule(models, batches, loss, forward_only=False, replay=replay)
    return {name: p.main_grad.clone() for name, p in models[0].named_parameters()}


def record_routing_maps(models: list[Any]) -> list[list[torch.Tensor]]:
    """Record the routing map [rows, experts] of every later call, by router."""
    maps_by_router: list[list[torch.Tensor]] = []
    for router in routers(models):
        maps: list[torch.Tensor] = []
        router.register_forward_hook(
            lambda _m, _i, out, maps=maps: maps.append(out[1].detach().clone())
        )
        maps_by_router.append(maps)
    return maps_by_router


def routing_map(routes: torch.Tensor, num_experts: int = 8) -> torch.Tensor:
    """Convert experts [rows, topk] to a routing map, bool [rows, experts]."""
    empty_map = torch.zeros(len(routes), num_experts, dtype=torch.bool)
    return empty_map.scatter(1, routes.long(), True)
