"""Bytes that changed between two versions of a file, compressed.

A change is the exclusive or of both versions, which is zero wherever they agree. It is exact for
every dtype and every bit pattern, NaN included, because it never looks at values.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from sglang_bridge.errors import EngineError

Bytes = npt.NDArray[np.uint8]
# The fastest of the ordinary levels: changes are mostly zeros
_LEVEL = 1
_MAX_THREADS = 8
_MAX_WINDOW_BYTES = 2**27


class BrokenDelta(EngineError):
    """A file of a push is missing, torn or changed, or does not follow what a node holds."""


class Change(NamedTuple):
    """A compressed change. num_changed: bytes that differ."""

    data: bytes
    num_changed: int


def compress_change(new: Bytes, base: Bytes, *, width: int = 1) -> Change:
    """Compress the change from `base` to `new`: uint8 [n], of equal length.

    width: bytes of most values in the file, which divides n. Bytes of equal significance are laid
    side by side, because the lower ones change more often.
    """
    change = np.bitwise_xor(new, base)
    planes = np.ascontiguousarray(change.reshape(-1, width).T)
    threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, threads=threads)
    return Change(compressor.compress(planes.data), int(np.count_nonzero(change)))


def apply_change(data: bytes, base: Bytes, *, width: int = 1) -> Bytes:
    """Return the new version: uint8 [n], as long as `base`.

    Memory is bounded by the length of `base`, whatever `data` says. Raises `BrokenDelta`.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size != len(base):
            raise BrokenDelta(f"it changes a file of {size} bytes, but the base has {len(base)}")
        planes = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompress(
            data, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise BrokenDelta(f"it cannot be decompressed ({error})") from error
    if size % width:
        raise BrokenDelta(f"values of {width} bytes do not fill a file of {size}")
    change = np.frombuffer(planes, dtype=np.uint8).reshape(width, -1).T.reshape(-1)
    return np.bitwise_xor(change, base)


def digest(data: Bytes) -> str:
    """Return the checksum of bytes: XXH3 with 128 bits, in hexadecimal.

    It finds accidents, not forgeries. Whoever may write these files may write weights anyway.
    """
    return xxhash.xxh3_128_hexdigest(data.data)
