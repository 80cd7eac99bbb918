"""Distributed data parallelism, the distributed AdamW and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron_rl.config.schema import OptimizerSettings


def wrap_data_parallel(models: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Wrap model chunks in Megatron's DDP with a distributed optimizer and float32 gradient
    reduction.
    """
    config = get_model_config(models[0])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
        # it raises on one rank while others wait; DistributedAdam agrees instead
        check_for_nan_in_grad=False,
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=i > 0)
        for i, model in enumerate(models)
    ]
    for model in wrapped:
        model.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    config.no_sync_func = None
    return wrapped


@dataclass(frozen=True)
class StepResult:
    """stepped False: some rank had a NaN or Inf, nothing changed anywhere; grad_norm is then NaN
    and lr 0.

    grad_norm: before clipping. lr: the rate that moved the parameters.
    """

    stepped: bool
    grad_norm: float
    lr: float


class DistributedAdam:
    """Megatron's distributed optimizer and schedule, with a finite check that all ranks agree on.

    `scheduler` counts the optimizer steps taken; `total_steps` is the step at which the decay ends.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        settings: OptimizerSettings,
        *,
        total_steps: int,
    ) -> None:
        self._models = models
        self._optimizer = get_megatron_optimizer(
            _config(get_model_config(models[0]), settings), list(models)
        )
        self._min_ratio = settings.min_lr_ratio
        self.scheduler = _schedule(self._optimizer, settings, total_steps)

    def scale_to(self, lr: float) -> None:
        """Go on along the same warm-up and decay, which from now on lead up to this rate; moments
        stay.
        """
        self.scheduler.max_lr, self.scheduler.min_lr = lr, lr * self._min_ratio
        for group in self._optimizer.param_groups:
            group["max_lr"], group["min_lr"] = self.scheduler.max_lr, self.scheduler.min_lr
        self.scheduler.step(0)

    def zero_grad(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, *, loss_is_finite: bool) -> StepResult:
        """Collective: clip and apply the reduced gradients, unless any rank's loss or gradients are
        not finite.
        """
        if not self._all_finite(loss_is_finite):
            return StepResult(stepped=False, grad_norm=float("nan"), lr=0.0)
        self.scheduler.step(1)
        _, grad_norm, _ = self._optimizer.step()
        return StepResult(
            True, float(grad_norm), get_canonical_lr_for_logging(self._optimizer.param_groups)
        )

    @property
    def steps(self) -> int:
        """How many optimizer steps were taken."""
        return int(self.scheduler.num_steps)

    def sharded_state(
        self, model_state: dict[str, Any], content: dict[str, Any], *, loading: bool
    ) -> Any:
        """The optimizer's tensors with their places in the whole model (a collective).

        model_state: the model's.
        """
        if not loading:
            self._fill_state()
        return self._optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=content)

    def load(self, state: Any, steps: int) -> None:
        """Take over a state that `sharded_state` laid out; rates and decays are those of this run's
        settings.
        """
        self._optimizer.load_state_dict(state)
        for group in self._optimizer.param_groups:
            if steps:
                group["step"] = steps  # a fused Adam counts there
        self.scheduler.num_steps = 0
        self.scheduler.step(steps)

    def _fill_state(self) -> None:
        """Moments of parameters that were never stepped are zeros: Megatron saves no others."""
        for optimizer in self._optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                for param in group["params"]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        if name not in optimizer.optimizer.state[param]:
                            optimizer.optimizer.state[param][name] = torch.zeros_like(
                                param, dtype=torch.float32
                            )

    def _all_finite(self, loss_is_finite: bool) -> bool:
        """Every rank's gradients and loss.

        The extremes of a buffer are NaN where one entry is, and take no memory.
        """
        buffers = [
            b.grad_data for m in self._models for b in (*m.buffers, *m.expert_parallel_buffers)
        ]
        extremes = torch.stack([extreme for grads in buffers for extreme in torch.aminmax(grads)])
        fine = (extremes.isfinite().all() & loss_is_finite).int()
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        return bool(fine)


def _config(model: TransformerConfig, settings: OptimizerSettings) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=model.bf16,
        params_dtype=model.params_dtype,
        use_distributed_optimizer=True,
    )


def _schedule(
    optimizer: MegatronOptimizer, settings: OptimizerSettings, total_steps: int
) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then the decay to min_lr_ratio * lr at step `total_steps`; constant
    weight decay.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(
            total_steps, settings.warmup_steps + 1
        ),  # Megatron takes no warm-up as long as the run
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
