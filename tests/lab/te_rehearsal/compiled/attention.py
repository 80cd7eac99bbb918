"""Answers for fused attention over packed sequences, in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

_FUSED = "NVTE_F16_arbitrary_seqlen"
_NONE = "NVTE_No_Backend"
_LAYOUT = "NVTE_THD_THD_THD"
_FORMAT = "NVTE_THD"
_SUPPORTED = (_LAYOUT, "NVTE_NO_BIAS", "NVTE_PADDING_CAUSAL_MASK")


def backend_of(extension: Any, capability: Callable[[], tuple[int, int]]) -> Callable[..., Any]:
    """Return the answer for `get_fused_attn_backend`.

    It follows the rules of Transformer Engine 2.17 for training with cuDNN 9.11 or later and
    packed sequences: head sizes, architecture, dtype and masks.
    """

    def get_fused_attn_backend(
        is_training: bool,
        q_dtype: Any,
        kv_dtype: Any,
        layout: Any,
        bias: Any,
        mask: Any,
        softmax: Any,
        dropout: float,
        heads: int,
        groups: int,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        key_dim: int,
        value_dim: int,
        window_left: int,
        window_right: int,
        return_max_logit: bool,
        cuda_graph: bool,
        deterministic: bool,
    ) -> Any:
        backends = extension.NVTE_Fused_Attn_Backend
        is_half = q_dtype.name in ("kBFloat16", "kFloat16") and q_dtype == kv_dtype
        is_known = (layout.name, bias.name, mask.name) == _SUPPORTED and dropout == 0.0
        fits = _fits(key_dim, value_dim, is_training=is_training, capability=capability())
        has_no_window = window_left == -1 and window_right in (-1, 0)
        is_fused = is_half and is_known and fits and has_no_window
        return getattr(backends, _FUSED if is_fused else _NONE)

    return get_fused_attn_backend


def _fits(key_dim: int, value_dim: int, *, is_training: bool, capability: tuple[int, int]) -> bool:
    """True for head sizes that cuDNN takes."""
    if key_dim % 8 or value_dim % 8 or capability < (9, 0):
        return False
    if max(key_dim, value_dim) <= 128 or (key_dim, value_dim) == (192, 128):
        return True
    is_hopper = capability == (9, 0)
    return is_hopper and max(key_dim, value_dim) <= 256 and key_dim == value_dim


@dataclass(frozen=True)
class ForwardCall:
    """The arguments of `fused_attn_fwd` in their order."""

    max_seqlen_q: int
    max_seqlen_kv: int
    is_training: bool
    scale: float
    dropout: float
    set_zero: bool
    layout: Any
    output_format: Any
    scale_format: Any
    bias: Any
    mask: Any
    softmax: Any
    window: Sequence[int]
    is_bottom_right: bool
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    fake_dtype: torch.dtype
    places_q: torch.Tensor | None
    places_kv: torch.Tensor | None


@dataclass(frozen=True)
class BackwardCall:
    """The arguments of `fused_attn_bwd` in their order."""

    max_seqlen_q: int
    max_seqlen_kv: int
    scale: float
    dropout: float
    set_zero: bool
    layout: Any
    output_format: Any
    output_gradient_format: Any
    gradient_layout: Any
    scale_format: Any
    output_gradient_scale_format: Any
    bias: Any
    mask: Any
    softmax: Any
    window: Sequence[int]
    is_bottom_right: bool
    deterministic: bool
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    output_gradient: torch.Tensor
    fake_dtype: torch.dtype
    context: Sequence[torch.Tensor]


def fused_attn_fwd(*args: Any) -> list[torch.Tensor]:
    """Attend causally within each sequence: [output, log-sum-exp [T, heads, 1], rng state].

    Rows outside of every sequence get zeros, as the compiled function fills its output first.
    """
    call = ForwardCall(*args[: len(fields(ForwardCall))])
    _require_supported(call)
    _require_unpadded(call.cu_seqlens_q, call.places_q)
    _require_unpadded(call.cu_seqlens_kv, call.places_kv)
    _require_longest(call.cu_seqlens_q, call.max_seqlen_q)
    query = call.query
    output = query.new_zeros(*query.shape[:-1], call.value.shape[-1])
    stats = torch.zeros(*query.shape[:-1], 1)
    for rows in _spans(call.cu_seqlens_q):
        scores = _scores(query[rows], call.key[rows], call.scale)
        stats[rows] = scores.logsumexp(-1).T[..., None]
        values = _per_query_head(call.value[rows], query.shape[1])
        output[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
    if not call.is_training:
        return [output]
    return [output, stats, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*args: Any) -> list[torch.Tensor]:
    """Return the gradients of query, key and value."""
    call = BackwardCall(*args[: len(fields(BackwardCall))])
    _require_supported(call)
    formats = (call.output_gradient_format.name, call.gradient_layout.name)
    if formats != (_FORMAT, _LAYOUT):
        raise NotImplementedError(f"gradients of fused attention in {' and '.join(formats)}")
    if len(call.context) != 2:
        raise ValueError(f"{len(call.context)} tensors, not log-sum-exp and rng state")
    gradients = [torch.zeros_like(tensor) for tensor in (call.query, call.key, call.value)]
    for rows in _spans(call.cu_seqlens_q):
        for gradient, part in zip(gradients, _head_gradients(call, rows), strict=True):
            by_group = part.unflatten(0, (gradient.shape[1], -1)).sum(1)
            gradient[rows] = by_group.transpose(0, 1).to(gradient.dtype)
    return gradients


def _head_gradients(call: BackwardCall, rows: slice) -> tuple[torch.Tensor, ...]:
    """Return the gradients of one sequence for each query head, float32 [heads, s, dim]."""
    query = call.query[rows]
    values = _per_query_head(call.value[rows], query.shape[1])
    keys = _per_query_head(call.key[rows], query.shape[1])
    scores = _scores(query, call.key[rows], call.scale)
    weights = (scores - call.context[0][rows, :, 0].T[..., None]).exp()
    upstream = call.output_gradient[rows].reshape(call.output[rows].shape).float().transpose(0, 1)
    output = call.output[rows].float().transpose(0, 1)
    mean = (upstream * output).sum(-1, keepdim=True)
    slopes = weights * (upstream @ values.mT - mean) * call.scale
    return slopes @ keys, slopes.mT @ query.float().transpose(0, 1), weights.mT @ upstream


def convert_thd_to_bshd(
    rows_of_all: torch.Tensor, cu_seqlens: torch.Tensor, batch: int, max_seqlen: int
) -> torch.Tensor:
    """Pad packed sequences with zeros: [T, heads, dim] to [batch, max_seqlen, heads, dim]."""
    batches = rows_of_all.new_zeros(batch, max_seqlen, *rows_of_all.shape[1:])
    for index, rows in enumerate(_spans(cu_seqlens)):
        batches[index, : rows.stop - rows.start] = rows_of_all[rows]
    return batches


def convert_bshd_to_thd(
    batches: torch.Tensor, cu_seqlens: torch.Tensor, total: int
) -> torch.Tensor:
    """Pack padded sequences: [batch, max_seqlen, heads, dim] to [T, heads, dim]."""
    rows_of_all = batches.new_zeros(total, *batches.shape[2:])
    for index, rows in enumerate(_spans(cu_seqlens)):
        rows_of_all[rows] = batches[index, : rows.stop - rows.start]
    return rows_of_all


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the masked scores of one sequence, float32 [heads, s, s]."""
    keys = _per_query_head(key, query.shape[1])
    scores = query.float().transpose(0, 1) @ keys.mT * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf"))


def _per_query_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[s, groups, dim] -> float32 [heads, s, dim]."""
    return tensor.float().transpose(0, 1).repeat_interleave(heads // tensor.shape[1], dim=0)


def _spans(cu_seqlens: torch.Tensor) -> Iterator[slice]:
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        yield slice(start, stop)


def _require_supported(call: ForwardCall | BackwardCall) -> None:
    names = (call.layout.name, call.bias.name, call.mask.name, call.output_format.name)
    if names != (*_SUPPORTED, _FORMAT) or call.is_bottom_right:
        raise NotImplementedError(f"fused attention of {', '.join(names)}")


def _require_unpadded(cu_seqlens: torch.Tensor, places: torch.Tensor | None) -> None:
    if places is not None and not torch.equal(places, cu_seqlens):
        raise NotImplementedError("fused attention with padding between sequences")


def _require_longest(cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
    """Raise ValueError if a sequence is longer than the caller says. cuDNN would cut it."""
    longest = int(cu_seqlens.diff().max())
    if longest > max_seqlen:
        raise ValueError(f"a sequence of {longest} rows, but max_seqlen is {max_seqlen}")
