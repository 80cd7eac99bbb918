"""Distributed data parallelism, the distributed AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config


@dataclass(frozen=True)
class AdamSettings:
    """AdamW; the schedule counts optimizer steps. decay: constant, linear or cosine, down to min_lr_ratio * lr."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    warmup_steps: int
    decay_steps: int
    decay: str
    min_lr_ratio: float


def learning_rate(settings: AdamSettings, step: int) -> float:
    """The rate of optimizer step `step` (0-based): linear warm-up to lr, then the decay over the remaining steps."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    span = max(1, settings.decay_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    if settings.decay == "constant":
        remaining = 1.0
    elif settings.decay == "linear":
        remaining = 1.0 - progress
    elif settings.decay == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"optimizer.decay={settings.decay!r}: choose constant, linear or cosine")
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * remaining)


def wrap_data_parallel(models: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Wrap model chunks in Megatron's DDP with a distributed optimizer and float32 gradient reduction."""
    config = get_model_config(models[0])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,  # it raises on one rank while others wait; DistributedAdam agrees instead
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=i > 0) for i, model in enumerate(models)
    ]
    for model in wrapped:
        model.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    config.no_sync_func = None
    return wrapped


@dataclass(frozen=True)
class StepResult:
    """stepped False: some rank had a NaN or Inf, nothing changed anywhere. grad_norm is before clipping."""

    stepped: bool
    grad_norm: float
    lr: float


class DistributedAdam:
    """Megatron's distributed optimizer with an agreed finite check and a schedule."""

    def __init__(self, models: Sequence[DistributedDataParallel], settings: AdamSettings) -> None:
        self._models = models
        self._settings = settings
        config = get_model_config(models[0])
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.lr * settings.min_lr_ratio,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                clip_grad=settings.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
            ),
            list(models),
        )
        self.steps_taken = 0

    def zero_grad(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, *, loss_is_finite: bool) -> StepResult:
        """Collective: clip and apply the reduced gradients, unless any rank's loss or gradients are not finite."""
        lr = learning_rate(self._settings, self.steps_taken)
        if not self._agree(loss_is_finite and self._gradients_are_finite()):
            return StepResult(False, float("nan"), lr)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)
        _, grad_norm, _ = self._optimizer.step()
        self.steps_taken += 1
        return StepResult(True, float(grad_norm), lr)

    def _gradients_are_finite(self) -> bool:
        buffers = [b for m in self._models for b in (*m.buffers, *m.expert_parallel_buffers)]
        return all(bool(torch.isfinite(buffer.grad_data).all()) for buffer in buffers)

    def _agree(self, fine: bool) -> bool:
        device = self._models[0].buffers[0].grad_data.device
        flag = torch.tensor(int(fine), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)
