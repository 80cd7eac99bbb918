"""SGLang's checksums of a parameter, computed while its bytes stream by.

SGLang hashes a tensor with SHA-256 on CPUs and with its own kernel on GPUs (sglang 0.5.23,
`tensor_hash`). The kernel mixes 32-bit words with their positions, sums them in tiles, and sums the
tiles' hashes. `GpuDigest` computes the same numbers with torch's integers, on any device.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch

_TILE_WORDS = 8192
_TILE_BYTES = 4 * _TILE_WORDS
# Bytes mixed at a time. The 64-bit copies of the words take eight times as much memory.
_CHUNK_BYTES = 256 * _TILE_BYTES
_MASK32 = 2**32 - 1
_MASK64 = 2**64 - 1
_MIX_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
_SEED = 0x243F6A88
# Of each lane: the multiplier of a word's position, the seed, and the rotation of the position.
_LANES = ((0x27D4EB2D, _SEED, 15), (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK32, 13))


class Digest(Protocol):
    """Hash of a parameter's bytes, given in order. Parts may have any size."""

    def update(self, data: torch.Tensor) -> None:
        """Add bytes. data: uint8 [bytes], contiguous."""
        ...

    def hexdigest(self) -> str:
        """The hash so far, as 16 hexadecimal digits."""
        ...


class CpuDigest:
    """The first eight bytes of SHA-256."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: torch.Tensor) -> None:
        """See `Digest`."""
        self._hash.update(data.cpu().numpy().data)

    def hexdigest(self) -> str:
        """See `Digest`."""
        return self._hash.hexdigest()[:16]


class GpuDigest:
    """SGLang's hash of GPU tensors. Partial sums stay on the device of the data."""

    def __init__(self) -> None:
        # int64 [2, tiles]: the sums of each tile's mixed words
        self._tiles: list[torch.Tensor] = []
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._words = 0

    def update(self, data: torch.Tensor) -> None:
        """See `Digest`."""
        data = torch.cat([self._rest.to(data.device), data])
        whole = len(data) // _TILE_BYTES * _TILE_BYTES
        for start in range(0, whole, _CHUNK_BYTES):
            words = data[start : min(start + _CHUNK_BYTES, whole)].view(torch.int32)
            self._tiles.append(_tile_sums(words, first=self._words))
            self._words += len(words)
        self._rest = data[whole:].clone()

    def hexdigest(self) -> str:
        """See `Digest`."""
        last = torch.cat([self._rest, self._rest.new_zeros(-len(self._rest) % 4)]).view(torch.int32)
        tiles = list(self._tiles)
        if len(last):
            tiles.append(_tile_sums(last, first=self._words))
        if not tiles:
            return f"{0:016x}"
        num_bytes = 4 * (self._words + len(last))
        high, low = _mix(torch.cat(tiles, dim=1) ^ (num_bytes & _MASK32))
        return f"{_splitmix64(int(((high << 32) | low).sum())):016x}"


def _tile_sums(words: torch.Tensor, *, first: int) -> torch.Tensor:
    """Sum the mixed words of each tile: int64 [2, tiles], below 2^32.

    words: int32 [n], whole tiles or part of one. first: the position of words[0].
    """
    values = words.to(torch.int64) & _MASK32
    position = torch.arange(first, first + len(values), device=values.device) & _MASK32
    lanes = []
    for multiplier, seed, rotation in _LANES:
        rotation_word = ((position << rotation) & _MASK32) | (position >> (32 - rotation))
        mixture = _mix(values ^ ((position * multiplier + seed) & _MASK32) ^ rotation_word)
        lanes.append(mixture.view(-1, min(_TILE_WORDS, len(mixture))).sum(dim=1) & _MASK32)
    return torch.stack(lanes)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply MurmurHash3's 32-bit finaliser to each number, in int64."""
    for shift, multiplier in zip((16, 13), _MIX_MULTIPLIERS, strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & _MASK32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    """Apply SplitMix64's finaliser."""
    x &= _MASK64
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * multiplier) & _MASK64
    return x ^ (x >> 31)
