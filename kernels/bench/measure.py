"""Clocks and memory meters for CPU and CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from bench.implementation import Run

# OpenMP's threads spin for a while after a parallel region, at the cost of the next run.
_QUIET_SECONDS = 0.1
# A graph holds so many runs that launching it takes no share of the time.
_GRAPH_SECONDS = 2e-3
_MOST_RUNS_OF_A_GRAPH = 20


class Timing(NamedTuple):
    best: float
    median: float


def seconds(runs: dict[str, Run], device: torch.device, repeats: int) -> dict[str, Timing]:
    """Seconds of each run, in alternation, after one warm-up of each.

    The CUDA graphs of the runs, and their memory, are freed before it returns.
    """
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


def copy_run(
    device: torch.device, num_bytes: int, *, smallest: int = 1 << 28, largest: int = 1 << 31
) -> tuple[Run, int]:
    """(a copy of about `num_bytes`, too many for a cache; the bytes it reads and writes).

    smallest: bytes that do not fit a cache. largest: no larger copy is faster.
    """
    size = min(max(num_bytes, smallest), largest) // 4
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def run() -> list[torch.Tensor]:
        if source.is_cuda:
            # In a graph, `copy_` becomes a transfer of the copy engine, which reaches 64 % of the
            # bandwidth of a kernel on an H200. Outside of one, both are equally fast.
            torch.add(source, 0, out=target)
        else:
            target.copy_(source)
        return []

    return run, 2 * source.nbytes


def extra_peak_bytes(run: Run, device: torch.device) -> int | None:
    """Peak memory of one run beyond the memory in use before it.

    None if the system does not report it.
    """
    give_back_free_memory(device)
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


def card_peak_gb(device: torch.device) -> float | None:
    """Largest memory that torch held on a GPU since `extra_peak_bytes`, in 10^9 bytes.

    It includes the graphs and the allocator's reserves. None for a CPU.
    """
    return torch.cuda.max_memory_reserved() / 1e9 if device.type == "cuda" else None


def host_peak_gb() -> float:
    """Largest resident size of this process, in 10^9 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def give_back_free_memory(device: torch.device) -> None:
    """Return free memory to the system: garbage and reserves would hide a run's peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
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
    runs_of_a_replay = 1
    # A capture that fails leaves torch's allocator in capture mode, so it is not tried in vain.
    if not _waits(run):
        share = _GRAPH_SECONDS / max(_stream_s(run), 1e-6)
        runs_of_a_replay = max(1, min(_MOST_RUNS_OF_A_GRAPH, int(share)))
        with contextlib.suppress(RuntimeError):
            replay = _capture(run, runs_of_a_replay).replay
        if replay is run:
            runs_of_a_replay = 1
            torch.cuda.synchronize()
    return lambda: _stream_s(replay, 5) / runs_of_a_replay


def _waits(run: Run) -> bool:
    """True if the host waits for the GPU within the run, which a graph does not allow."""
    with _waits_raise():
        try:
            run()
        except RuntimeError:
            return True
    return False


@contextlib.contextmanager
def _waits_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def _capture(run: Run, times: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def _stream_s(run: Callable[[], object], iterations: int = 1) -> float:
    """Seconds of one of several runs on the current stream."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(iterations):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / iterations
