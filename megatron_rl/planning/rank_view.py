"""Which part of a batch and of the model one rank needs: pure arithmetic over parallel sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.config.schema import ParallelSettings


@dataclass(frozen=True)
class RankView:
    """layers[v]: 0-based decoder layers of virtual pipeline chunk v. sp_size is 1 without sequence parallelism."""

    layers: tuple[tuple[int, ...], ...]
    cp_rank: int = 0
    cp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1

    @classmethod
    def of(
        cls, num_layers: int, parallel: ParallelSettings, *, pp_rank: int = 0, cp_rank: int = 0, tp_rank: int = 0
    ) -> RankView:
        """The view of one rank. Raises ValueError when the layers do not divide evenly."""
        pp, vpp = parallel.pp, parallel.vpp or 1
        if num_layers % (pp * vpp):
            raise ValueError(
                f"{num_layers} layers do not divide into parallel.pp x parallel.vpp = {pp} x {vpp} chunks: "
                "choose sizes whose product divides the number of layers"
            )
        per_chunk = num_layers // (pp * vpp)
        starts = [(virtual * pp + pp_rank) * per_chunk for virtual in range(vpp)]
        return cls(
            layers=tuple(tuple(range(start, start + per_chunk)) for start in starts),
            cp_rank=cp_rank,
            cp_size=parallel.cp,
            sp_rank=tp_rank if parallel.sequence_parallel else 0,
            sp_size=parallel.tp if parallel.sequence_parallel else 1,
        )

    @property
    def row_multiple(self) -> int:
        """Sequences are padded to this many rows: two zigzag chunks a context rank, each split over sequence ranks."""
        return (2 * self.cp_size if self.cp_size > 1 else 1) * self.sp_size

    def moe_rows(self, moe_layers: Sequence[int]) -> tuple[int, ...]:
        """Positions in the MoE-layer axis (`moe_layers` ascending) of the layers this rank holds, chunk by chunk."""
        held = {layer for chunk in self.layers for layer in chunk}
        return tuple(i for i, layer in enumerate(moe_layers) if layer in held)

    def input_rows(self, cu_seqlens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Rows of the packed batch this rank's routers see, in their order.

        cu_seqlens int32 [B + 1] counts padded rows. Context parallelism gives rank r the chunks r and 2c-1-r of each
        sequence's 2c (zigzag); sequence parallelism then splits those rows into contiguous slices.
        """
        rows = np.concatenate(
            [self._zigzag(start, stop) for start, stop in itertools.pairwise(cu_seqlens)] or [np.empty(0, np.int64)]
        )
        if len(rows) % self.sp_size:
            raise ValueError(
                f"{len(rows)} rows do not divide over {self.sp_size} sequence-parallel ranks: pad the batch"
            )
        share = len(rows) // self.sp_size
        return rows[self.sp_rank * share : (self.sp_rank + 1) * share]

    def _zigzag(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        if self.cp_size == 1:
            return np.arange(start, stop)
        chunks = 2 * self.cp_size
        if (stop - start) % chunks:
            raise ValueError(f"a sequence of {stop - start} rows does not divide into {chunks} context-parallel chunks")
        size = (stop - start) // chunks
        first, last = start + self.cp_rank * size, start + (chunks - 1 - self.cp_rank) * size
        return np.concatenate([np.arange(first, first + size), np.arange(last, last + size)])
