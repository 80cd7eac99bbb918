"""Layers and batch rows that one rank needs, from the parallel sizes alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.models.pipeline_split import PipelineSplit


@dataclass(frozen=True)
class RankView:
    """Layers and rows of one rank.

    layers: layers[v] are the 0-based decoder layers of virtual pipeline chunk v.
    cp_rank, cp_size: context-parallel rank and size.
    sp_rank, sp_size: sequence-parallel rank and size, those of tensor parallelism.
    """

    layers: tuple[tuple[int, ...], ...]
    cp_rank: int = 0
    cp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1

    @classmethod
    def for_rank(
        cls,
        num_layers: int,
        parallel: ParallelSettings,
        *,
        pp_rank: int = 0,
        cp_rank: int = 0,
        tp_rank: int = 0,
    ) -> RankView:
        """Compute the view of one rank.

        Raises ValueError if the layers cannot be split over the pipeline stages.
        """
        split = PipelineSplit.balanced(num_layers, parallel.pp, parallel.vpp or 1)
        return cls(
            layers=split.layers()[pp_rank],
            cp_rank=cp_rank,
            cp_size=parallel.cp,
            sp_rank=tp_rank,
            sp_size=parallel.tp,
        )

    @property
    def row_multiple(self) -> int:
        """Number of rows whose multiple the length of each padded sequence is.

        Each context-parallel rank gets two zigzag chunks. Each chunk is split over the
        sequence-parallel ranks.
        """
        num_chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        return num_chunks * self.sp_size

    def moe_rows(self, moe_layers: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of this rank's layers in the MoE-layer axis, chunk by chunk.

        moe_layers: layers of the whole model that have experts, ascending.
        """
        layers = {layer for chunk in self.layers for layer in chunk}
        return tuple(i for i, layer in enumerate(moe_layers) if layer in layers)

    def context_rows(self, cu_seqlens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the rows of the packed batch that this rank's model reads.

        The sequence-parallel ranks of a slice share these rows. See `input_rows`.
        """
        return zigzag_rows(cu_seqlens, self.cp_rank, self.cp_size)

    def input_rows(self, cu_seqlens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the rows of the packed batch that this rank's routers see, int64.

        They are this rank's contiguous slice of `context_rows`, in the same order.

        cu_seqlens: int32 [B + 1], cumulative lengths of the padded sequences.

        Raises ValueError if the rows cannot be split evenly.
        """
        rows = self.context_rows(cu_seqlens)
        if len(rows) % self.sp_size:
            raise ValueError(
                f"{len(rows)} rows do not divide over {self.sp_size} sequence-parallel ranks: "
                "pad the batch"
            )
        share = len(rows) // self.sp_size
        return rows[self.sp_rank * share : (self.sp_rank + 1) * share]


def zigzag_rows(
    cu_seqlens: npt.NDArray[np.int32], cp_rank: int, cp_size: int
) -> npt.NDArray[np.int64]:
    """Return the rows of context-parallel rank r of c, int64.

    Each sequence has 2c chunks. The rank gets the chunks r and 2c-1-r, as in Transformer Engine,
    so that all ranks have the same share of a causal mask.

    cu_seqlens: int32 [B + 1], cumulative lengths of sequences padded to a multiple of 2c rows.

    Raises ValueError if a sequence cannot be split into 2c chunks.
    """
    parts = [np.empty(0, np.int64)]
    for start, stop in itertools.pairwise(cu_seqlens):
        if cp_size == 1:
            parts.append(np.arange(start, stop))
            continue
        size, remainder = divmod(stop - start, 2 * cp_size)
        if remainder:
            raise ValueError(
                f"a sequence of {stop - start} rows does not divide into {2 * cp_size} "
                "context-parallel chunks: pad the batch"
            )
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            first = start + chunk * size
            parts.append(np.arange(first, first + size))
    return np.concatenate(parts)
