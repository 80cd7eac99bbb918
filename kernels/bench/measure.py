"""Clocks and memory meters for CPU and CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bench.implementation import Run

# OpenMP's threads spin for a while after a parallel region, at the cost of the next run.
_QUIET_SECONDS = 0.1


class Timing(NamedTuple):
    best: float
    median: float


def seconds(runs: dict[str, Run], device: torch.device, repeats: int) -> dict[str, Timing]:
    """Seconds of each run, in alternation, after one warm-up of each."""
    clocks = {
        name: _cuda_clock(run) if device.type == "cuda" else _cpu_clock(run)
        for name, run in runs.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, clock in clocks.items():
            samples[name].append(clock())
    return {
        name: Timing(min(values), statistics.median(values)) for name, values in samples.items()
    }


def copy_run(device: torch.device, num_bytes: int) -> tuple[Run, int]:
    """(a copy of at least `num_bytes`, too many for a cache; the bytes it reads and writes)."""
    source = torch.ones(max(num_bytes, 1 << 28) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def run() -> list[torch.Tensor]:
        target.copy_(source)
        return []

    return run, 2 * source.nbytes


def extra_peak_bytes(run: Run, device: torch.device) -> int | None:
    """Peak memory of one run beyond the memory in use before it.

    None if the system does not report it.
    """
    _give_back_free_memory()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the process's peak resident size
        before = _status_bytes("VmRSS")
        run()
        return _status_bytes("VmHWM") - before
    except OSError:
        return None


def _give_back_free_memory() -> None:
    """Return free memory to the system: garbage and malloc's reserves would hide a run's peak."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _cpu_clock(run: Run) -> Callable[[], float]:
    run()

    def clock() -> float:
        time.sleep(_QUIET_SECONDS)
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return clock


def _cuda_clock(run: Run) -> Callable[[], float]:
    """Kernel time: replays of a CUDA graph, or the stream's time if the run cannot be captured."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    replay: Callable[[], object] = run
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    except RuntimeError:  # something in the run synchronises
        torch.cuda.synchronize()

    def clock(iterations: int = 5) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(iterations):
            replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / iterations

    return clock
