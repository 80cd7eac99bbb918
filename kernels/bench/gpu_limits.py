"""Limits of GPUs as NVIDIA publishes them, and the occupancy that follows."""

from __future__ import annotations

from dataclasses import dataclass

_THREADS_OF_A_WARP = 32
_REGISTERS_OF_AN_ALLOCATION = 256
"""Registers are allocated to a warp in units of 256."""
_RESERVED_SHARED_BYTES = 1024
"""The driver reserves 1 KiB of shared memory for each block."""


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one SM with compute capability 9.0 or 10.0 (CUDA C++ Programming Guide, 20.2)."""

    registers: int = 65_536
    threads: int = 2_048
    shared_bytes: int = 228 * 1024
    blocks: int = 32


@dataclass(frozen=True)
class Gpu:
    """A GPU. bytes_per_s: peak bandwidth of its memory."""

    name: str
    capability: int
    multiprocessors: int
    bytes_per_s: float


H100 = Gpu("H100 SXM", 90, 132, 3.35e12)
H200 = Gpu("H200", 90, 132, 4.8e12)


def resident_blocks(
    registers: int, threads: int, shared_bytes: int, limits: Multiprocessor | None = None
) -> int:
    """Blocks that one SM holds at a time.

    min(blocks, threads / block's threads, shared / (block's shared + 1 KiB), registers / block's
    registers), each rounded down. A block's registers are its warps times 32 registers of each
    thread, rounded up to 256 a warp.

    registers: of one thread. threads, shared_bytes: of one block.
    """
    limits = limits or Multiprocessor()
    warps = -(-threads // _THREADS_OF_A_WARP)
    unit = _REGISTERS_OF_AN_ALLOCATION
    warp_registers = -(-registers * _THREADS_OF_A_WARP // unit) * unit
    return min(
        limits.blocks,
        limits.threads // (warps * _THREADS_OF_A_WARP),
        limits.shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES),
        limits.registers // (warp_registers * warps),
    )


def occupancy(registers: int, threads: int, shared_bytes: int) -> float:
    """The share of an SM's threads that resident blocks fill, from 0 to 1."""
    blocks = resident_blocks(registers, threads, shared_bytes)
    return blocks * threads / Multiprocessor().threads
