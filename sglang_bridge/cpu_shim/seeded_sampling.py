"""Samples the tokens of a CPU engine by their request's seed.

A response does not depend on the other requests of its batch, or on their timing. SGLang has this
for some GPU kernels (`--enable-deterministic-inference`). On a CPU it would ignore the seeds.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# SplitMix64's increment and multipliers.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def sample(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample one index of each row, with probabilities proportional to its weights.

    weights: [rows, V], none negative, a positive one in each row. seeds, positions: [rows],
    integers. Returns int64 [rows, 1]: a row's first index whose cumulative weight exceeds u times
    the sum, where u follows from seed and position.

    Raises `ValueError` for a row without weight, or with NaN.
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not bool(((total > 0) & total.isfinite()).all()):
        raise ValueError(
            "the model's probabilities are NaN, infinite or all zero: are its weights finite?"
        )
    # u times the sum may be rounded up to the sum.
    limit = torch.nextafter(total, torch.zeros_like(total))
    threshold = (uniform(seeds, positions)[:, None] * total).minimum(limit)
    return torch.searchsorted(cumulative, threshold, right=True)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Float64 numbers [rows] in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of each seed.

    positions: how many steps the generator has advanced.
    """
    with np.errstate(over="ignore"):
        state = (
            seeds.numpy().astype(np.uint64)
            + (positions.numpy().astype(np.uint64) + np.uint64(1)) * _GOLDEN
        )
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def assign_seeds(sampling_batch_info: Any) -> None:
    """Let `sglang.srt.sampling.sampling_batch_info` keep the seeds, which it would drop.

    A request without a seed gets a random one.
    """
    info = sampling_batch_info.SamplingBatchInfo
    original = info.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        batch_info = original(cls, batch, vocab_size)
        for request in batch.reqs:
            if request.sampling_params.sampling_seed is None:
                request.sampling_params.sampling_seed = random.getrandbits(63)
        batch_info.sampling_seed = torch.tensor(
            [request.sampling_params.sampling_seed for request in batch.reqs]
        )
        return batch_info

    info.from_schedule_batch = classmethod(from_schedule_batch)


def token_mask(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Mask [rows, V] of the tokens that top-k, top-p and min-p leave.

    A row without such limits keeps all tokens. It is therefore sampled alike whether or not another
    row of the batch has limits.
    """
    sorted_probs, index = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
    mask = torch.arange(probs.shape[1]) < top_ks[:, None]
    mask &= (mass_before <= top_ps[:, None]) | (top_ps[:, None] >= 1)
    mask &= sorted_probs >= sorted_probs[:, :1] * min_ps[:, None]
    return torch.empty_like(mask).scatter_(1, index, mask)


def sample_by_seed(sampler: Any) -> None:
    """Let `sglang.srt.layers.sampler` sample by seed.

    Its own seeded sampling needs a CUDA kernel, or a batch in which no row sets min-p.
    """
    original = sampler.top_k_top_p_min_p_sampling_from_probs_torch

    def sample_all(
        probs: torch.Tensor, sampling_seed: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return sample(probs, sampling_seed, positions).view(-1).to(torch.int32)

    def sample_limited(
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
        mask = token_mask(probs, top_ks, top_ps, min_ps)
        return sample_all(probs * mask, sampling_seed, positions)

    sampler.sampling_from_probs_torch = sample_all
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample_limited
