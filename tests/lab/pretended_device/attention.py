"""Attention as the CPU computes it, for tensors of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.lab.pretended_device.host_waits import HostWaits

_FLASH = 1  # torch's number of its fused kernel
_CAUSAL = (-1, 0)


def install_dense_attention() -> None:
    """Let `scaled_dot_product_attention` use the CPU's fused kernel where the CPU would."""
    functional: Any = F
    attend_by_products = F.scaled_dot_product_attention
    host = torch.ops.pretended_device.as_host

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
        if query.is_cuda and not enable_gqa and dropout_p == 0.0:
            host_mask = None if attn_mask is None else host(attn_mask)
            inputs = (host(query), host(key), host(value))
            if torch._fused_sdp_choice(*inputs, host_mask, 0.0, **options) == _FLASH:
                return _flash(query, key, value, attn_mask, **options)
        return attend_by_products(
            query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, **options
        )

    functional.scaled_dot_product_attention = attend


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )[0]
    return output


def install_varlen_attention(waits: HostWaits) -> None:
    """Give the trainer variable-length attention that computes what its padded batches compute.

    It stands for a fused kernel, so that its waits do not count.
    """
    from megatron_rl.mcore.layers import varlen_attention

    def varlen_attn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: Sequence[int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        from megatron_rl.mcore.layers.attention import PackedAttention  # imports Megatron

        if tuple(window_size) != _CAUSAL or cu_seq_q is not cu_seq_k:
            raise NotImplementedError("the pretended device attends causally within sequences")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError("keys have fewer heads than queries: pass enable_gqa=True")
        config: Any = SimpleNamespace(context_parallel_size=1)
        attention = PackedAttention(config, 1, None, "self", softmax_scale=scale)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return attention._attend_in_buckets(queries, keys, values, cu_seq_q.tolist())

        output: torch.Tensor = _Kernel.apply(attend, waits, query, key, value)
        return output

    module: Any = varlen_attention
    module._import_varlen_attn = lambda: varlen_attn


class _Kernel(torch.autograd.Function):
    """A function of tensors whose waits do not count, in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., torch.Tensor], waits: HostWaits, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.waits = waits
        ctx.inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        with waits.pause(), torch.enable_grad():
            ctx.output = function(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        with ctx.waits.pause():
            return None, None, *torch.autograd.grad(ctx.output, ctx.inputs, gradient)
