"""Runs a step of the only rank of a model, as a process on the CPU or as a rehearsal.

    python one_rank.py process|rehearsal OUT SETTING...

Both write bytes by phase. `process` asks the kernel for the memory of the whole process, and torch
for what its allocator gave out. Neither knows anything of the rehearsal's meter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MICRO_BATCHES = 2
# Attention of a GPU older than Ampere is the CPU's: padded sequences.
CAPABILITY = (7, 0)


def rehearse(settings: Sequence[str]) -> dict[str, dict[str, int]]:
    """Rehearse the rank. Returns bytes by phase and kind."""
    from launch.rehearsal.cuda_guard import load_cuda_guard

    load_cuda_guard()
    from launch.rehearsal.gpus import GPUS
    from launch.rehearsal.rank import Place, Workload, rehearse_rank
    from megatron_rl.config.cli import compose
    from megatron_rl.contracts.launch_facts import LaunchFacts

    c = compose(settings, facts=LaunchFacts(world_size=1, local_world_size=1, num_gpus=1))
    gpu = dataclasses.replace(GPUS["a100"], capability=CAPABILITY)
    return rehearse_rank(c, Place(0, 1, 1, gpu), Workload(MICRO_BATCHES)).memory


class ProcessMeter:
    """Stands for the rehearsal's meter. It asks the kernel how much memory the process has.

    idle: bytes of the process before the step.
    """

    def __init__(self) -> None:
        self.idle = 0

    @property
    def peak(self) -> dict[str, int]:
        return {"process": status_bytes("VmHWM") - self.idle}

    def start_peak(self) -> None:
        """Set the kernel's peak of the process to what it has now."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    @contextlib.contextmanager
    def kind(self, _name: str) -> Iterator[None]:
        yield

    def relabel(self, _tensors: Any, _kind: str) -> None: ...

    def relabel_all(self, _kind: str) -> None: ...


class ProcessMode:
    """Stands for the rehearsal's device. Phases are marks in torch's profile."""

    def __init__(self) -> None:
        self.meter = ProcessMeter()
        self.log = SimpleNamespace(message_shape=(), entries=[])
        self.phase = ""
        self.flops: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.host_reads: dict[str, int] = {}

    def set_phase(self, phase: str) -> None:
        import torch

        self.phase = phase
        with torch.profiler.record_function(f"phase {phase}"):
            pass


def measure(settings: Sequence[str]) -> dict[str, dict[str, int]]:
    """Run the rank on the CPU. Returns bytes by phase: of the process and of torch's allocator.

    A first step compiles and loads what later ones use. "model" is what the process got while the
    model was built.
    """
    from megatron_rl.mcore import compat

    compat.install()
    import torch
    import torch.distributed as dist

    from launch.rehearsal.gpus import GPUS
    from launch.rehearsal.rank import Place, RankStep, Workload
    from megatron_rl.config.cli import compose
    from megatron_rl.contracts.launch_facts import LaunchFacts
    from megatron_rl.models.families import read_shape
    from megatron_rl.run import build_worker  # noqa: F401  its modules are no memory of a model

    c = compose(settings, facts=LaunchFacts(world_size=1, local_world_size=1, num_gpus=0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for dtype in (torch.float32, torch.bfloat16):
        torch.ones(64, 64, dtype=dtype) @ torch.ones(64, 64, dtype=dtype)
    mode: Any = ProcessMode()
    before = status_bytes("RssAnon")
    step = RankStep(c, read_shape(c.model.path), Place(0, 1, 1, GPUS["a100"]), mode)
    gc.collect()
    model = status_bytes("RssAnon") - before
    step.run(Workload(1))
    gc.collect()
    mode.meter.idle = status_bytes("VmRSS")
    memory = dict(step.run(Workload(MICRO_BATCHES)).memory)
    gc.collect()
    for phase, peak in allocator_peaks(lambda: step.run(Workload(MICRO_BATCHES))).items():
        memory[phase]["allocator"] = peak
    return {"model": {"process": model}, **memory}


def allocator_peaks(run: Callable[[], object]) -> dict[str, int]:
    """The most bytes that torch's allocator gives out at once during a run, by phase."""
    import torch

    profile: Any
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [
        (event.start_ns(), event.name(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith("phase ")
    ]
    current = 0
    phase = ""
    peaks: dict[str, int] = {}
    for _, name, num_bytes in sorted(events):
        if name == "[memory]":
            current += num_bytes
        else:
            phase = name.removeprefix("phase ")
        if phase not in ("", "end"):
            peaks[phase] = max(peaks.get(phase, 0), current)
    return peaks


def status_bytes(key: str) -> int:
    """Return a number of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def main() -> None:
    """Write what was measured or rehearsed."""
    mode, out, *settings = sys.argv[1:]
    memory = measure(settings) if mode == "process" else rehearse(settings)
    Path(out).write_text(json.dumps(memory))


if __name__ == "__main__":
    main()
