"""Which part of a batch and of the model one rank needs: pure arithmetic over parallel sizes."""

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
    """layers[v]: 0-based decoder layers of virtual pipeline chunk v. sp_size is 1 without sequence
    parallelism.
    """

    layers: tuple[tuple[int, ...], ...]
    cp_rank: int = 0
    cp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1

    @classmethod
    def of(
        cls,
        num_layers: int,
        parallel: ParallelSettings,
        *,
        pp_rank: int = 0,
        cp_rank: int = 0,
        tp_rank: int = 0,
    ) -> RankView:
        """The view of one rank. Raises ValueError when the layers cannot be split so."""
        split = PipelineSplit(
            num_layers,
            parallel.pp,
            parallel.vpp or 1,
            parallel.first_stage_layers,
            parallel.last_stage_layers,
        )
        return cls(
            layers=split.layers()[pp_rank],
            cp_rank=cp_rank,
            cp_size=parallel.cp,
            sp_rank=tp_rank if parallel.sequence_parallel else 0,
            sp_size=parallel.tp if parallel.sequence_parallel else 1,
        )

    @property
    def row_multiple(self) -> int:
        """Sequences are padded to this many rows: two zigzag chunks a context rank, each split over
        sequence ranks.
        """
        return (2 * self.cp_size if self.cp_size > 1 else 1) * self.sp_size

    def moe_rows(self, moe_layers: Sequence[int]) -> tuple[int, ...]:
        """Positions in the MoE-layer axis (`moe_layers` ascending) of the layers this rank holds,
        chunk by chunk.
        """
        held = {layer for chunk in self.layers for layer in chunk}
        return tuple(i for i, layer in enumerate(moe_layers) if layer in held)

    def context_rows(self, cu_seqlens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Rows of the packed batch that the model of this rank is given; the ranks of a sequence
        slice share them.
        """
        return zigzag_rows(cu_seqlens, self.cp_rank, self.cp_size)

    def input_rows(self, cu_seqlens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Rows of the packed batch that this rank's routers see: its contiguous slice of
        `context_rows`, in order.

        cu_seqlens int32 [B + 1] counts padded rows.
        """
        rows = self.context_rows(cu_seqlens)
        if len(rows) % self.sp_size:
            raise ValueError(
                f"{len(rows)} rows do not divide over {self.sp_size} sequence-parallel ranks: pad the batch"
            )
        share = len(rows) // self.sp_size
        return rows[self.sp_rank * share : (self.sp_rank + 1) * share]


def zigzag_rows(
    cu_seqlens: npt.NDArray[np.int32], cp_rank: int, cp_size: int
) -> npt.NDArray[np.int64]:
    """Rows of context-parallel rank r of c: the chunks r and 2c-1-r of each sequence's 2c, as
    Transformer Engine's.

    Every rank so has the same share of a causal mask. cu_seqlens int32 [B + 1] counts rows padded
    to a multiple of 2c.
    """
    parts = [np.empty(0, np.int64)]
    for start, stop in itertools.pairwise(cu_seqlens):
        if cp_size == 1:
            parts.append(np.arange(start, stop))
            continue
        size, rest = divmod(stop - start, 2 * cp_size)
        if rest:
            raise ValueError(
                f"a sequence of {stop - start} rows does not divide into {2 * cp_size} context-parallel chunks"
            )
        chunks = (start + chunk * size for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank))
        parts += [np.arange(first, first + size) for first in chunks]
    return np.concatenate(parts)
