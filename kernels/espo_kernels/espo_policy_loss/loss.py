"""The public function `espo_policy_loss`: checks, then one backend.

    s_τ = exp(mean_{t∈τ} (log π_θ − log π_old))        s_t = sg[s_τ] · π_θ(y_t) / sg[π_θ(y_t)]
    J   = 1/B Σ_i 1/K_i Σ_τ 1/|τ| Σ_{t∈τ} min(s_t A_t, clip(s_t, 1 − ε_τ, 1 + ε_τ) A_t)

|log s| is clamped at 10 (the value, not the gradient). K_i counts the non-empty groups of sequence
i; a sequence without unmasked tokens contributes nothing. The gradient of an unmasked token with
A ≠ 0 is zero exactly where (A > 0 and s > 1 + ε) or (A < 0 and s < 1 − ε), and
−s_t A_t / (B K_i |τ|) elsewhere. One group with a fixed clip is GSPO-token; one-token groups are
PPO-clip averaged over tokens, then sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from espo_kernels.arguments import (
    FLOATS,
    INTEGERS,
    require_cu_seqlens_values,
    require_finite,
    require_floating,
    require_mask,
    require_one_device,
    require_packed,
    require_shape,
)
from espo_kernels.backends import Backend, checks_values, resolve_backend
from espo_kernels.espo_groups import EspoGroups
from espo_kernels.espo_policy_loss.inputs import LossInputs, RatioDenominator
from espo_kernels.espo_policy_loss.metrics import EspoMetrics
from espo_kernels.segments import MASKED


class EspoResult(NamedTuple):
    """loss: scalar to minimise, differentiable in logprobs, float32 (float64 for float64 logprobs).

    metrics: detached, see `EspoMetrics`.
    """

    loss: torch.Tensor
    metrics: EspoMetrics


def espo_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    groups: EspoGroups,
    *,
    num_sequences: float | torch.Tensor | None = None,
    ratio_denominator: RatioDenominator = "current",
    loss_mask: torch.Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
    check_values: bool | None = None,
    backend: Backend = "auto",
) -> EspoResult:
    """The ESPO loss −J, to minimise (arXiv 2512.00499 v2, Eq. 7 to 9; written out at the top of
    this module).

    Args:
        logprobs, old_logprobs, advantages: [T] float, log π_θ(y_t) and log π_old(y_t) in nats, A_t.
            Gradient flows through the first.
        cu_seqlens: [B + 1] integers, from 0 to T, not decreasing.
        groups: of `espo_groups`, for these tokens and sequences.
        num_sequences: B, a constant of the global batch when this call is one micro-batch of it.
            None: the sequences of this call with a non-zero advantage on an unmasked token. A
            number, or a tensor of one element.
        ratio_denominator: "current" as above; "old" is Eq. 9 as printed, s_t = sg[s_τ] · π_θ(y_t) /
            sg[π_old(y_t)].
        loss_mask: [T] bool. Tokens masked here or in `groups` belong to no group, |τ| counts those
            that remain.
        cp_group: ranks that hold other tokens of the same B sequences. The loss is the sum of what
            they return.
        check_values, backend: see `espo_kernels`.

    Raises:
        ValueError or TypeError naming the argument. NaN or infinite inputs on unmasked tokens, a
        invalid cu_seqlens and a num_sequences tensor that is not positive raise where values are
        checked; otherwise the loss is NaN.
    """
    inputs = LossInputs(
        old_logprobs=old_logprobs.detach().contiguous(),
        advantages=advantages.detach().contiguous(),
        cu_seqlens=cu_seqlens.contiguous(),
        group_id=groups.group_id.contiguous(),
        clip=groups.clip.contiguous(),
        loss_mask=None if loss_mask is None else loss_mask.contiguous(),
        ratio_denominator=ratio_denominator,
        num_sequences=_scalar_count(num_sequences),
        cp_group=cp_group,
    )
    _check(logprobs, inputs)
    selected_backend = resolve_backend(backend, logprobs, cpu_needs_numba=True)
    if checks_values(logprobs, selected_backend, check_values):
        _check_values(logprobs, inputs)
    return _loss(selected_backend, logprobs, inputs)


def _loss(backend: Backend, logprobs: torch.Tensor, inputs: LossInputs) -> EspoResult:
    match backend:
        case "triton":
            from espo_kernels.espo_policy_loss.triton_launch import loss_triton, scale_triton

            loss, gradient, inverse_B, metrics = loss_triton(logprobs.detach().contiguous(), inputs)
            return EspoResult(
                _WithGradient.apply(logprobs, loss, gradient, inverse_B, scale_triton), metrics
            )
        case "cpu":
            from espo_kernels.espo_policy_loss.cpu import loss_cpu, scale_cpu

            inputs, poison = inputs.in_bounds()
            loss, gradient, inverse_B, metrics = loss_cpu(logprobs.detach().contiguous(), inputs)
            return EspoResult(
                _WithGradient.apply(logprobs, loss + poison, gradient, inverse_B, scale_cpu),
                metrics,
            )
    from espo_kernels.espo_policy_loss.reference import loss_reference

    inputs, poison = inputs.in_bounds()
    loss, metrics = loss_reference(logprobs, inputs)
    return EspoResult(loss + poison, metrics)


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient, but for the factor 1/B, was computed together with it."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: torch.Tensor,
        loss: torch.Tensor,
        gradient: torch.Tensor,
        inverse_B: torch.Tensor,
        scale: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient, inverse_B)
        ctx.dtype = logprobs.dtype
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        gradient, inverse_B = ctx.saved_tensors
        return ctx.scale(gradient, grad_loss, inverse_B, ctx.dtype), None, None, None, None


def _check(logprobs: torch.Tensor, inputs: LossInputs) -> None:
    require_packed("logprobs", logprobs, inputs.cu_seqlens)
    tensors = _token_inputs(logprobs, inputs)
    for name, tensor in tensors.items():
        require_floating(name, tensor)
        require_shape(name, tensor, (logprobs.numel(),), "logprobs")
    require_shape("groups.group_id", inputs.group_id, (logprobs.numel(),), "logprobs")
    if inputs.group_id.dtype != torch.uint8:
        raise TypeError(
            f"groups.group_id has dtype {inputs.group_id.dtype}: must be uint8, "
            "as espo_groups returns it"
        )
    if (
        inputs.clip.dim() != 2
        or inputs.clip.shape[0] != inputs.cu_seqlens.numel() - 1
        or inputs.clip.shape[1] < 1
    ):
        raise ValueError(
            f"groups.clip has shape {tuple(inputs.clip.shape)}: must be [B, K] for the "
            f"{inputs.cu_seqlens.numel() - 1} sequences of cu_seqlens"
        )
    require_mask(inputs.loss_mask, logprobs.numel(), "logprobs")
    require_one_device(
        **tensors,
        cu_seqlens=inputs.cu_seqlens,
        group_id=inputs.group_id,
        clip=inputs.clip,
        loss_mask=inputs.loss_mask,
        num_sequences=inputs.num_sequences
        if isinstance(inputs.num_sequences, torch.Tensor)
        else None,
    )
    if inputs.ratio_denominator not in ("current", "old"):
        raise ValueError(
            f"ratio_denominator={inputs.ratio_denominator!r}: must be 'current' or 'old'"
        )


def _token_inputs(logprobs: torch.Tensor, inputs: LossInputs) -> dict[str, torch.Tensor]:
    return {
        "logprobs": logprobs,
        "old_logprobs": inputs.old_logprobs,
        "advantages": inputs.advantages,
    }


def _scalar_count(num_sequences: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """`num_sequences`, a one-element tensor as a scalar tensor whose value is not read."""
    if isinstance(num_sequences, torch.Tensor):
        if num_sequences.dtype not in (*FLOATS, *INTEGERS):
            raise TypeError(
                f"num_sequences has dtype {num_sequences.dtype}: "
                "must be a floating or integer dtype"
            )
        if num_sequences.numel() != 1:
            raise ValueError(
                f"num_sequences has shape {tuple(num_sequences.shape)}: must hold one number"
            )
        return num_sequences.detach().reshape(())
    if num_sequences is not None:
        if not isinstance(num_sequences, Real):
            raise TypeError(f"num_sequences={num_sequences!r}: must be a number or a tensor of one")
        _require_positive(num_sequences)
    return num_sequences


def _require_positive(num_sequences: float) -> None:
    if not (math.isfinite(num_sequences) and num_sequences > 0):
        raise ValueError(
            f"num_sequences={num_sequences}: must be positive and finite "
            "(skip a step without sequences)"
        )


def _check_values(logprobs: torch.Tensor, inputs: LossInputs) -> None:
    require_cu_seqlens_values(inputs.cu_seqlens, inputs.group_id.numel())
    members = inputs.members()
    strays = ((members != MASKED) & (members >= inputs.num_groups)).nonzero()
    if strays.numel():
        at = int(strays[0])
        raise ValueError(
            f"groups.group_id[{at}] is {int(members[at])}: must be below {inputs.num_groups}, "
            "the groups of groups.clip"
        )
    for name, tensor in _token_inputs(logprobs, inputs).items():
        require_finite(name, tensor, members != MASKED)
    if not bool(torch.isfinite(inputs.clip).all()):
        raise ValueError("groups.clip has NaN or infinite entries: were the old entropies finite?")
    if isinstance(inputs.num_sequences, torch.Tensor):
        _require_positive(inputs.num_sequences.item())
