"""A tiny model of one rank with replay, and one pass over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from launch.testbed.packed_sequences import pack, targets_of
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.models.families import read_shape

MICRO_BATCHES = [(0, 1, 2), (3, 4)]


def build(
    checkpoint: Path,
    recompute: Literal["none", "selective", "full"] = "none",
    *,
    modules: list[Any] | None = None,
    dtype: Any = "float32",
    **overrides: Any,
) -> Any:
    """One rank's wrapped models with the checkpoint's weights, and their replay.

    modules: `model.recompute_modules`. overrides: Megatron's own settings.
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
    from megatron.core.transformer.moe.router import TopKRouter

    return [m for model in models for m in model.modules() if isinstance(m, TopKRouter)]


def train_pass(models: list[Any], replay: Any) -> dict[str, torch.Tensor]:
    """One forward and backward over the micro-batches; returns the gradients by parameter name."""
    from megatron_rl.mcore.schedule import run_schedule

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        value = torch.nn.functional.cross_entropy(
            logits, targets_of(MICRO_BATCHES[index]), reduction="sum"
        )
        return value / 50, None

    models[0].zero_grad_buffer()
    run_schedule(
        models, [pack(m, range(3)) for m in MICRO_BATCHES], loss, forward_only=False, replay=replay
    )
    return {name: p.main_grad.clone() for name, p in models[0].named_parameters()}


def chosen(models: list[Any]) -> list[list[torch.Tensor]]:
    """Records the routing map of every router call from now on, per router."""
    seen: list[list[torch.Tensor]] = [[] for _ in routers(models)]
    for router, calls in zip(routers(models), seen, strict=True):
        router.register_forward_hook(
            lambda _m, _i, out, calls=calls: calls.append(out[1].detach().clone())
        )
    return seen
