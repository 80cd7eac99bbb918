"""Which decoder layers each pipeline stage holds: Megatron's arithmetic, uneven first and last
stages included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSplit:
    """`num_layers` over `stages`, each in `chunks` that interleave. first, last: layers of these
    stages; None: even.

    layers[stage][chunk] are 0-based layers, ascending. Chunk after chunk, every stage takes its
    share in turn.
    """

    num_layers: int
    stages: int
    chunks: int = 1
    first: int | None = None
    last: int | None = None

    def problem(self) -> str:
        """Why the layers cannot be split like this; empty where they can."""
        given = [size for size in (self.first, self.last) if size is not None]
        if given and self.stages == 1:
            return "a single pipeline stage holds every layer"
        left, middle = self.num_layers - sum(given), self.stages - len(given)
        where = (
            f"the {left} layers"
            if not given
            else f"the {left} layers that the first and last stage leave"
        )
        if (left == 0) != (middle == 0) or left < 0 or (middle and left % (middle * self.chunks)):
            chunks = f" of {self.chunks} chunks each" if self.chunks > 1 else ""
            return f"{where} do not divide over {middle} stage(s){chunks}"
        if not middle and self.chunks > 1:
            return "two pipeline stages of several chunks take one of first and last, not both"
        if any(size % self.chunks for size in given):
            return f"{' and '.join(map(str, given))} layers do not divide into {self.chunks} chunks"
        return ""

    def layers(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Layers by stage and chunk. Raises ValueError where `problem` has something to say."""
        if problem := self.problem():
            raise ValueError(f"parallel.pp={self.stages}: {problem}")
        shares = [size // self.chunks for size in self._sizes()]
        held: list[list[tuple[int, ...]]] = [[] for _ in shares]
        start = 0
        for _ in range(self.chunks):
            for stage, share in zip(held, shares, strict=True):
                stage.append(tuple(range(start, start + share)))
                start += share
        return tuple(map(tuple, held))

    def _sizes(self) -> list[int]:
        """The number of layers of every stage."""
        given = [size for size in (self.first, self.last) if size is not None]
        middle = self.stages - len(given)
        sizes = [(self.num_layers - sum(given)) // middle] * middle if middle else []
        first, last = ([self.first] if self.first else []), ([self.last] if self.last else [])
        return [*first, *sizes, *last]
