"""torch's causal attention over packed sequences, with one signature for every torch version."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

_HALF_PRECISION = (torch.bfloat16, torch.float16)
# FlashAttention's limit on the size of a head.
_MAX_HEAD_DIM = 256
_AMPERE = (8, 0)  # FlashAttention's lowest compute capability


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn` (torch 2.10 and later) with one signature.

    torch 2.10 spells causality `is_causal` and takes no scale. torch 2.11 has `window_size` and
    `scale`. torch 2.12 adds `enable_gqa`. What the installed version lacks is done here.

    function: the attention function; None imports torch's when it is first needed.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function_override = function

    @functools.cached_property
    def _function(self) -> Callable[..., Any] | None:
        """The attention function, or None.

        The import waits until inputs qualify, because it loads torch's compiler, which costs a
        second and is of no use on CPUs.
        """
        if self._function_override is not None:
            return self._function_override
        return _import_varlen_attn()

    @functools.cached_property
    def _parameters(self) -> Collection[str]:
        """The names of the function's parameters."""
        if self._function is None:
            return ()
        return inspect.signature(self._function).parameters.keys()

    @property
    def is_available(self) -> bool:
        """True if the installed torch has variable-length attention."""
        return self._function is not None

    def supports(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """True if FlashAttention takes these tensors and torch has it.

        They must be in half precision on CUDA and share one head size, a multiple of 8 up to 256.
        The GPU must be of the Ampere generation or later.
        """
        dim = query.shape[-1]
        has_one_size = key.shape[-1] == value.shape[-1] == dim
        is_valid_size = has_one_size and dim % 8 == 0 and dim <= _MAX_HEAD_DIM
        is_half_on_cuda = query.is_cuda and query.dtype in _HALF_PRECISION
        if not (is_half_on_cuda and is_valid_size):
            return False
        return torch.cuda.get_device_capability(query.device) >= _AMPERE and self.is_available

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float | None,
    ) -> torch.Tensor:
        """Attend within each sequence and return [T, heads, dim].

        query: [T, heads, dim]. key and value: [T, groups, dim], where groups divides heads.
        cu_seqlens: int32 [B + 1], the bounds of the sequences, on the same device.
        max_seqlen: the length of the longest sequence.
        scale: factor of the scores; None is 1 / sqrt(dim).

        Raises RuntimeError if `is_available` is False.
        """
        if self._function is None:
            raise RuntimeError(
                "this torch has no variable-length attention: check `is_available` before the call"
            )
        options = self._causal_option()
        if scale is not None:
            if "scale" in self._parameters:
                options["scale"] = scale
            else:
                query = query * (scale * query.shape[-1] ** 0.5)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1 and "enable_gqa" in self._parameters:
            options["enable_gqa"] = True
        elif repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        output: torch.Tensor = self._function(
            query,
            key.contiguous(),
            value.contiguous(),
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            **options,
        )
        return output

    def _causal_option(self) -> dict[str, Any]:
        if "window_size" in self._parameters:
            return {"window_size": (-1, 0)}
        return {"is_causal": True}


def _import_varlen_attn() -> Callable[..., Any] | None:
    """Import torch's function; None if this torch lacks it."""
    try:
        function: Callable[..., Any] = importlib.import_module(
            "torch.nn.attention.varlen"
        ).varlen_attn
    except (ImportError, AttributeError):
        return None
    return function
