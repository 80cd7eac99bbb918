"""Tokens of a CPU engine drawn by their request's seed: the same whatever else is drawn beside
them, and when.

SGLang has this for some GPUs' kernels (`--enable-deterministic-inference`); on a CPU it would
ignore the seeds.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_GOLDEN, _FIRST, _SECOND = (
    np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def draw(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One index of each row, with probabilities proportional to its weights.

    weights: [rows, V], none negative, a positive one in each row. seeds, positions: [rows],
    integers. Returns int64 [rows, 1]. A row's first index whose cumulative weight is above u times
    the sum; u follows from seed and position. Raises ValueError for a row without weight, or with
    NaN.
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not bool(((total > 0) & total.isfinite()).all()):
        raise ValueError(
            "the model's probabilities are NaN, infinite or all zero: are its weights finite?"
        )
    below = torch.nextafter(
        total, torch.zeros_like(total)
    )  # u times the sum may be rounded up to the sum
    return torch.searchsorted(
        cumulative, (uniform(seeds, positions)[:, None] * total).minimum(below), right=True
    )


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Float64 numbers [rows] in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of a seed, as many
    steps on.
    """
    with np.errstate(over="ignore"):
        state = (
            seeds.numpy().astype(np.uint64)
            + (positions.numpy().astype(np.uint64) + np.uint64(1)) * _GOLDEN
        )
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def keep_seeds(sampling_batch_info: Any) -> None:
    """`sglang.srt.sampling.sampling_batch_info`, which drops them; a request without one gets one
    by chance.
    """
    info = sampling_batch_info.SamplingBatchInfo
    original = info.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        made = original(cls, batch, vocab_size)
        for request in batch.reqs:
            if request.sampling_params.sampling_seed is None:
                request.sampling_params.sampling_seed = random.getrandbits(63)
        made.sampling_seed = torch.tensor(
            [request.sampling_params.sampling_seed for request in batch.reqs]
        )
        return made

    info.from_schedule_batch = classmethod(from_schedule_batch)


def kept(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Which tokens [rows, V] remain: the top_k likeliest, those that make up top_p, those of min_p
    of the likeliest.

    A row that asks for none of it keeps all, so that it is drawn alike whether or not another row
    does.
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    stay = torch.arange(probs.shape[1]) < top_ks[:, None]
    stay &= (before <= top_ps[:, None]) | (top_ps[:, None] >= 1)
    stay &= ordered >= ordered[:, :1] * min_ps[:, None]
    return torch.empty_like(stay).scatter_(1, index, stay)


def draw_by_seed(sampler: Any) -> None:
    """`sglang.srt.layers.sampler`, whose own ways need a kernel for CUDA, or a batch of which no
    row asks for min-p.
    """
    original = sampler.top_k_top_p_min_p_sampling_from_probs_torch

    def of_all(
        probs: torch.Tensor, sampling_seed: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return draw(probs, sampling_seed, positions).view(-1).to(torch.int32)

    def of_some(
        probs: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
        need_min_p: bool,
        sampling_seed: torch.Tensor,
        positions: torch.Tensor,
        **options: Any,
    ) -> Any:
        if options.get("return_filtered_probs"):
            return original(probs, top_ks, top_ps, min_ps, need_min_p, None, positions, **options)
        return of_all(probs * kept(probs, top_ks, top_ps, min_ps), sampling_seed, positions)

    sampler.sampling_from_probs_torch, sampler.top_k_top_p_min_p_sampling_from_probs_torch = (
        of_all,
        of_some,
    )
