"""Data parallelism, Megatron's distributed AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
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
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron_rl.config.schema import OptimizerSettings
from megatron_rl.mcore.seams import count_padding

# The learning rate at the end of its decay, as a share of the peak. Training goes on meanwhile.
MIN_LR_RATIO = 0.1
# The verdicts on a step, from the worst on
_NOT_FINITE, _TOO_LARGE, _APPLICABLE = range(3)


def wrap_data_parallel(
    models: Sequence[torch.nn.Module],
    *,
    overlap: bool = False,
) -> list[DistributedDataParallel]:
    """Wrap model chunks in Megatron's DDP, with a distributed optimizer and float32 reduction.

    Collective: broadcasts the parameters of the first data-parallel rank.

    overlap: reduce gradients bucket by bucket during the last backward pass, and gather weights
        bucket by bucket during the next forward pass. They are incomplete until then, or until
        `DistributedAdam.complete_weights`.
    """
    config = get_model_config(models[0])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        use_distributed_optimizer=True,
        # Megatron's check raises on one rank while others wait. In `DistributedAdam` all ranks
        # agree instead.
        check_for_nan_in_grad=False,
    )
    ddp_models = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=i > 0)
        for i, model in enumerate(models)
    ]
    for model in ddp_models:
        model.broadcast_params()
        count_padding(model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    # Gradients are reduced after the last micro-batch alone.
    no_sync = [model.no_sync for model in ddp_models] if overlap else None
    config.no_sync_func = no_sync[0] if no_sync and len(no_sync) == 1 else no_sync
    return ddp_models


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    is_applied: False if some rank had a NaN or Inf, or the gradients were too large. Nothing
        changed on any rank then, and lr is 0.
    grad_norm: the norm of all gradients before clipping. NaN if it is not finite.
    lr: the learning rate of this update.
    """

    is_applied: bool
    grad_norm: float
    lr: float

    @property
    def is_spike(self) -> bool:
        """True if the step was not applied because the norm exceeds the limit."""
        return not self.is_applied and math.isfinite(self.grad_norm)


class DistributedAdam:
    """Megatron's distributed AdamW and its schedule, with a finite check that all ranks agree on.

    `scheduler` is Megatron's `OptimizerParamScheduler`. It counts the optimizer steps taken.

    models: the chunks of `wrap_data_parallel`.
    total_steps: the step at which the decay of the learning rate ends.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        settings: OptimizerSettings,
        *,
        total_steps: int,
    ) -> None:
        self._models = models
        self._overlaps_gather = models[0].ddp_config.overlap_param_gather
        self._optimizer = get_megatron_optimizer(
            _config(get_model_config(models[0]), settings), list(models)
        )
        self.scheduler = _schedule(self._optimizer, settings, total_steps)

    def set_peak_lr(self, lr: float) -> None:
        """Continue the same warm-up and decay with another peak learning rate.

        The moments and the count of steps stay.
        """
        self.scheduler.max_lr = lr
        self.scheduler.min_lr = lr * MIN_LR_RATIO
        for group in self._optimizer.param_groups:
            group["max_lr"] = self.scheduler.max_lr
            group["min_lr"] = self.scheduler.min_lr
        self.scheduler.step(0)

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to zero."""
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, *, loss_is_finite: bool, max_norm: float | None = None) -> StepResult:
        """Clip and apply the reduced gradients. Collective over all ranks.

        Nothing changes on any rank if the loss or a gradient of one rank is not finite, or if the
        square of the gradients' norm exceeds float32: clipping would make all gradients 0, and
        without clipping second moments would be infinite from then on. The norm shows all of this.
        A NaN or Inf of any rank is in the sum over ranks, and the norm is the square root of a sum
        in float32.

        loss_is_finite: False if this rank's loss is NaN or Inf. max_norm: nothing changes either
        if the norm exceeds it on one rank.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        verdict = self._agree(norm, loss_is_finite, max_norm)
        if verdict == _NOT_FINITE:
            return StepResult(is_applied=False, grad_norm=float("nan"), lr=0.0)
        if verdict == _TOO_LARGE:
            return StepResult(is_applied=False, grad_norm=norm, lr=0.0)
        self.scheduler.step(1)
        self._clip(norm)
        self._apply()
        lr = get_canonical_lr_for_logging(self._optimizer.param_groups)
        return StepResult(is_applied=True, grad_norm=norm, lr=lr)

    def complete_weights(self) -> None:
        """Gather the weights of the last step where that overlaps with passes. Collective.

        Call it between the last step and everything that reads weights outside of a pass.
        """
        if self._overlaps_gather:
            for model in self._models:
                model.start_param_sync(force_sync=True)

    def weights_are_finite(self) -> bool:
        """True if no weight of any rank is NaN or Inf. Collective.

        The minimum and maximum of a tensor are NaN if one entry is, and take no memory.
        """
        extremes: list[torch.Tensor] = []
        for model in self._models:
            for parameter in model.parameters():
                extremes += torch.aminmax(parameter.detach().view(-1))
        return _true_on_all_ranks(torch.stack([x.float() for x in extremes]).isfinite().all())

    @property
    def steps(self) -> int:
        """The number of optimizer steps taken."""
        return int(self.scheduler.num_steps)

    def sharded_state(
        self, model_state: dict[str, Any], content: dict[str, Any], *, loading: bool
    ) -> Any:
        """Return the optimizer's tensors with their places in the whole model. Collective.

        model_state: the sharded state of the models.
        content: Megatron's description of the format.
        loading: True for a state that a checkpoint will fill.
        """
        if not loading:
            self.initialize_moments()
        return self._optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=content)

    def load(self, state: Any, steps: int) -> None:
        """Load a state that was laid out by `sharded_state`, after `steps` optimizer steps.

        Learning rates and weight decay follow this run's settings, not the checkpoint's.
        """
        self._optimizer.load_state_dict(state)
        for group in self._optimizer.param_groups:
            if steps or "step" in group:
                group["step"] = steps  # a fused Adam counts there
        self.scheduler.num_steps = 0
        self.scheduler.step(steps)

    def initialize_moments(self) -> None:
        """Add zero moments for parameters without a step, because Megatron saves no others."""
        for optimizer in self._optimizer.chained_optimizers:
            state = optimizer.optimizer.state
            for group in optimizer.optimizer.param_groups:
                for param in group["params"]:
                    _add_moments(state[param], param)

    def _agree(self, norm: float, loss_is_finite: bool, max_norm: float | None) -> int:
        """Return the worst verdict of all ranks on a step, such as `_APPLICABLE`. Collective."""
        verdict = _APPLICABLE
        if max_norm is not None and norm > max_norm:
            verdict = _TOO_LARGE
        if not (loss_is_finite and math.isfinite(norm)):
            verdict = _NOT_FINITE
        device = self._models[0].buffers[0].grad_data.device
        return _least_of_all_ranks(torch.full((), verdict, dtype=torch.int32, device=device))

    def _clip(self, norm: float) -> None:
        """Scale all gradients so that their norm is at most the limit of the settings."""
        for optimizer in self._optimizer.chained_optimizers:
            if optimizer.config.clip_grad and (parameters := optimizer.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, optimizer.config.clip_grad, norm)

    def _apply(self) -> None:
        """Update this rank's share of the weights, and gather all weights unless that overlaps."""
        for optimizer in self._optimizer.chained_optimizers:
            # Each `DistributedOptimizer` would gather the weights of all of them.
            MixedPrecisionOptimizer.step_with_ready_grads(optimizer)
        if not self._overlaps_gather:
            for model in self._models:
                model.start_param_sync()


def _true_on_all_ranks(flag: torch.Tensor) -> bool:
    """True if the flag of every rank is true. Collective."""
    return bool(_least_of_all_ranks(flag.int()))


def _least_of_all_ranks(number: torch.Tensor) -> int:
    """Return the least of the ranks' numbers, int32 scalars, which it overwrites. Collective."""
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    return int(number)


def _add_moments(state: dict[str, torch.Tensor], param: torch.Tensor) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=torch.float32)


def _config(model: TransformerConfig, settings: OptimizerSettings) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr * MIN_LR_RATIO,
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
    """Schedule a linear warm-up from 0 and a decay to a tenth of `lr` at step `total_steps`.

    Weight decay is constant.
    """
    # Megatron refuses a warm-up that is as long as the run.
    decay_steps = max(total_steps, settings.warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.lr * MIN_LR_RATIO,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
