"""Decoder layers of each pipeline stage, computed as Megatron does."""

from __future__ import annotations

from dataclasses import dataclass

_ENDS = 2  # the first and the last stage


@dataclass(frozen=True)
class PipelineSplit:
    """Distribution of `num_layers` over `stages`.

    chunks: virtual stages of each stage. Chunk after chunk, every stage takes its share in turn.
    first, last: number of layers of the first and last stage. None: as many as the others.
    """

    num_layers: int
    stages: int
    chunks: int = 1
    first: int | None = None
    last: int | None = None

    @classmethod
    def balanced(cls, num_layers: int, stages: int, chunks: int = 1) -> PipelineSplit:
        """Split layers evenly, or else give the first and the last stage fewer than the others.

        These two have more to do: they embed tokens and compute logits. The split may have a
        `problem`.
        """
        units = num_layers // chunks  # a stage has the same number of layers in each of its chunks
        if units < stages or num_layers % chunks or not units % stages:
            return cls(num_layers, stages, chunks)
        middle = -(-units // stages)
        if units - middle * (stages - 2) < _ENDS:
            middle -= 1
        ends = units - middle * (stages - 2)
        last = ends // _ENDS * chunks
        # Megatron gives the rest of two stages to the other one
        first = None if stages == _ENDS else ends * chunks - last
        return cls(num_layers, stages, chunks, first, last)

    def problem(self) -> str:
        """Return why the layers cannot be split like this, or an empty string if they can."""
        sizes = self._fixed_sizes()
        if sizes and self.stages == 1:
            return "a single pipeline stage holds every layer"
        layers = self.num_layers - sum(sizes)
        stages = self.stages - len(sizes)
        if not self._divides(layers, stages):
            subject = f"the {layers} layers"
            if sizes:
                subject += " that the first and last stage leave"
            chunks = f" of {self.chunks} chunks each" if self.chunks > 1 else ""
            return f"{subject} do not divide over {stages} stage(s){chunks}"
        if not stages and self.chunks > 1:
            return (
                "two pipeline stages of several chunks accept only one of the first and last "
                "stage's sizes"
            )
        if any(size % self.chunks for size in sizes):
            return f"{' and '.join(map(str, sizes))} layers do not divide into {self.chunks} chunks"
        return ""

    def layers(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the 0-based layers as layers[stage][chunk], ascending.

        Raises ValueError if `problem` finds one.
        """
        if problem := self.problem():
            raise ValueError(f"parallel.pp={self.stages}: {problem}")
        shares = [size // self.chunks for size in self._sizes()]
        layers: list[list[tuple[int, ...]]] = [[] for _ in shares]
        start = 0
        for _ in range(self.chunks):
            for stage, share in zip(layers, shares, strict=True):
                stage.append(tuple(range(start, start + share)))
                start += share
        return tuple(map(tuple, layers))

    def _fixed_sizes(self) -> list[int]:
        return [size for size in (self.first, self.last) if size is not None]

    def _divides(self, layers: int, stages: int) -> bool:
        """Return whether all chunks of the stages without a fixed size get equally many layers."""
        if stages == 0:
            return layers == 0
        return layers > 0 and layers % (stages * self.chunks) == 0

    def _sizes(self) -> list[int]:
        """Return the number of layers of every stage."""
        fixed_sizes = self._fixed_sizes()
        stages = self.stages - len(fixed_sizes)
        even_size = (self.num_layers - sum(fixed_sizes)) // stages if stages else 0
        sizes = [even_size] * stages
        if self.first:
            sizes.insert(0, self.first)
        if self.last:
            sizes.append(self.last)
        return sizes
