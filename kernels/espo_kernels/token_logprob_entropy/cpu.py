"""CPU path: compiled loops over rows, split over torch's intra-op threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from espo_kernels.token_logprob_entropy.numba_bits import as_bits
from espo_kernels.token_logprob_entropy.numba_loops import gradients, partial_sums
from espo_kernels.token_logprob_entropy.vocabulary import (
    TokenStatistics,
    VocabularyShard,
    gather_shards,
    merge_shards,
)

_MIN_LOGITS_PER_THREAD = 1 << 18


def forward(logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard) -> TokenStatistics:
    """See `BackendKernels`."""
    tokens, columns = logits.shape
    partial = torch.empty(4, tokens, dtype=torch.float32)
    bits = as_bits(logits)
    ids = targets.long().numpy()
    out = partial.numpy()
    inverse_temperature = np.float32(shard.inverse_temperature)

    def rows(start: int, end: int) -> None:
        partial_sums(
            bits, columns, ids, out, start, end, shard.first, shard.valid, inverse_temperature
        )

    _over_rows(rows, tokens, columns)
    return merge_shards(gather_shards(partial, shard), targets, columns, shard.inverse_temperature)


def backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    statistics: TokenStatistics,
    grad_logprob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    shard: VocabularyShard,
    inplace: bool,
) -> torch.Tensor:
    """See `BackendKernels`."""
    out = logits if inplace else _empty_like(logits)
    tokens, columns = logits.shape
    if grad_entropy is None:
        grad_entropy = torch.zeros_like(grad_logprob)
    per_token = torch.stack(
        (statistics.anchor, statistics.log_sum, statistics.entropy, grad_logprob, grad_entropy)
    ).numpy()
    bits = as_bits(logits)
    ids = targets.long().numpy()
    result = as_bits(out)
    inverse_temperature = np.float32(shard.inverse_temperature)

    def rows(start: int, end: int) -> None:
        gradients(
            bits,
            columns,
            ids,
            per_token,
            result,
            start,
            end,
            shard.first,
            shard.valid,
            inverse_temperature,
            inplace,
        )

    _over_rows(rows, tokens, columns)
    return out


def _empty_like(logits: torch.Tensor) -> torch.Tensor:
    # numpy asks the kernel for huge pages where torch does not: at 256 MiB, 512 times fewer page
    # faults, which would take longer than the gradient itself.
    bits = np.empty(logits.shape, np.int32 if logits.itemsize == 4 else np.int16)
    return torch.from_numpy(bits).view(logits.dtype)


def _over_rows(loop: Callable[[int, int], None], rows: int, columns: int) -> None:
    # Threads of our own: numba's OpenMP layer ends a process that forks afterwards, and its
    # portable layer is not safe to enter from two threads.
    threads = max(1, min(torch.get_num_threads(), rows, rows * columns // _MIN_LOGITS_PER_THREAD))
    if threads == 1:
        loop(0, rows)
        return
    edges = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(loop, edges[:-1], edges[1:]))
