"""torch's causal attention over packed sequences of different lengths, in the form that the
installed torch has.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256  # of FlashAttention


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn` (torch 2.10 and later) under one signature.

    2.10 spells causality `is_causal` and takes no scale; 2.11 has `window_size` and `scale`; 2.12
    adds `enable_gqa`. What is missing is done here. function: None looks it up; `available` is
    False where there is none.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._given = function

    @functools.cached_property
    def _function(self) -> Callable[..., Any] | None:
        """Looked up when something fits: its import brings torch's compiler, a second for nothing
        on CPUs.
        """
        return self._given if self._given is not None else _torch_function()

    @functools.cached_property
    def _takes(self) -> Collection[str]:
        return (
            inspect.signature(self._function).parameters.keys()
            if self._function is not None
            else ()
        )

    @property
    def available(self) -> bool:
        """Whether the installed torch has it."""
        return self._function is not None

    def fits(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether FlashAttention takes these: half precision on CUDA, one head size, a multiple of
        8 up to 256.
        """
        dim = query.shape[-1]
        one_size = (
            key.shape[-1] == value.shape[-1] == dim and dim % 8 == 0 and dim <= _MOST_HEAD_DIM
        )
        return query.is_cuda and query.dtype in _HALF and one_size and self.available

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
        """[T, heads, dim] in and out; key and value [T, groups, dim]. cu_seqlens int32 [B + 1] on
        the same device.

        scale None: 1 / sqrt(dim).
        """
        if self._function is None:
            raise RuntimeError("this torch has no variable-length attention: ask `available` first")
        options: dict[str, Any] = {}
        if "window_size" in self._takes:
            options["window_size"] = (-1, 0)
        else:
            options["is_causal"] = True
        if scale is not None:
            if "scale" in self._takes:
                options["scale"] = scale
            else:
                query = query * (scale * query.shape[-1] ** 0.5)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1 and "enable_gqa" in self._takes:
            options["enable_gqa"] = True
        elif repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        out: torch.Tensor = self._function(
            query,
            key.contiguous(),
            value.contiguous(),
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            **options,
        )
        return out


def _torch_function() -> Callable[..., Any] | None:
    try:
        found: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return found
