"""Numbers of the GPUs that a rehearsal can assume.

Rates come from the data sheets, and the memory from nvidia-smi.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links.

    name: as users write it. memory: bytes. flops: dense bfloat16 operations a second.
    bandwidth: of its memory, bytes a second. node_bandwidth, network_bandwidth: bytes a second that
    one GPU sends to others of its node (NVLink) and to other nodes (one 400 Gbit/s link for each).
    capability: CUDA's compute capability. processors: streaming multiprocessors.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    capability: tuple[int, int]
    processors: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 81_920 * _MIB, 312e12, 2.04e12, 300e9, 25e9, (8, 0), 108),
        Gpu("h100", 81_559 * _MIB, 989e12, 3.35e12, 450e9, 50e9, (9, 0), 132),
        Gpu("h200", 143_771 * _MIB, 989e12, 4.8e12, 450e9, 50e9, (9, 0), 132),
        Gpu("b200", 183_359 * _MIB, 2250e12, 7.7e12, 900e9, 50e9, (10, 0), 148),
    )
}
