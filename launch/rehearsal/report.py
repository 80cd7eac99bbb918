"""Prints what a rehearsal found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from launch.rehearsal.collective_log import Collective
from launch.rehearsal.gpus import Gpu
from launch.rehearsal.rank import RankReport
from megatron_rl.planning.memory import RankMemory

GIB = 2**30


def link_seconds(
    collectives: Sequence[Collective], gpu: Gpu, gpus_per_node: int, rank: int
) -> float:
    """The seconds that collectives take at the links' full rates, one after another.

    A group within one node uses the node's links. All others use the network.
    """
    seconds = 0.0
    for collective in collectives:
        nodes = {member // gpus_per_node for member in (*collective.ranks, rank)}
        rate = gpu.node_bandwidth if len(nodes) == 1 else gpu.network_bandwidth
        seconds += collective.link_bytes / rate
    return seconds


def describe(report: RankReport, plan: RankMemory) -> Iterator[str]:
    """Yield the lines of a report. plan: what `planning/memory.py` estimates for this rank."""
    place = report.place
    yield (
        f"rank {place.rank} of {place.world_size}, pipeline stage {report.pipeline_stage}: "
        f"{report.parameters / 1e9:.3f} billion parameters, "
        f"{report.micro_batches} micro-batches of "
        f"{report.tokens} tokens, {place.gpu.name}"
    )
    yield from _memory_lines(report)
    yield f"launch/preflight.py estimates {plan.total / GIB:.2f} GiB for this rank"
    yield from _work_lines(report)
    yield from _collective_lines(report)
    yield from _host_read_lines(report)


def _memory_lines(report: RankReport) -> Iterator[str]:
    kinds = sorted({kind for memory in report.memory.values() for kind in memory})
    yield ""
    yield "GiB at the peak of  " + "".join(f"{kind:>19}" for kind in (*kinds, "total"))
    for phase, memory in report.memory.items():
        sizes = [*(memory.get(kind, 0) for kind in kinds), sum(memory.values())]
        yield f"{phase:<20}" + "".join(f"{size / GIB:>19.3f}" for size in sizes)
    total = sum(report.peak.values())
    limit = report.place.gpu.memory / GIB
    verdict = "fits into" if report.fits else "DOES NOT FIT into"
    yield f"the largest is {total / GIB:.2f} GiB, which {verdict} the GPU's {limit:.2f} GiB"
    if not report.fits:
        yield _describe_shortage(report, total - report.place.gpu.memory)


def _describe_shortage(report: RankReport, shortage: int) -> str:
    """Name the rank, the phase and the kind of memory. shortage: bytes that the GPU lacks."""
    phase = max(report.memory, key=lambda name: sum(report.memory[name].values()))
    kind = max(report.peak, key=lambda name: report.peak[name])
    return (
        f"rank {report.place.rank} lacks {shortage / GIB:.2f} GiB in phase {phase!r}: its largest "
        f"kind is {kind} with {report.peak[kind] / GIB:.2f} GiB"
    )


def _work_lines(report: RankReport) -> Iterator[str]:
    yield ""
    yield f"{'phase':<20}{'matrix PFLOP':>16}{'device s':>12}{'links s':>12}"
    for phase in report.memory:
        collectives = [entry for entry in report.collectives if entry.phase == phase]
        place = report.place
        links = link_seconds(collectives, place.gpu, place.gpus_per_node, place.rank)
        flops = report.flops.get(phase, 0) / 1e15
        yield f"{phase:<20}{flops:>16.4f}{report.seconds.get(phase, 0.0):>12.4f}{links:>12.4f}"
    yield "(seconds at the data sheet's peak rates, nothing overlapped: a lower bound of each part)"


def _collective_lines(report: RankReport) -> Iterator[str]:
    counts: Counter[tuple[str, str, int]] = Counter()
    num_bytes: dict[tuple[str, str, int], float] = defaultdict(float)
    for entry in report.collectives:
        key = (entry.phase, entry.name.strip("_"), len(entry.ranks))
        counts[key] += 1
        num_bytes[key] += entry.link_bytes
    yield ""
    yield f"{'phase':<14}{'collective':<34}{'ranks':>6}{'calls':>8}{'GiB sent':>12}"
    for key in sorted(counts):
        phase, name, size = key
        yield f"{phase:<14}{name:<34}{size:>6}{counts[key]:>8}{num_bytes[key] / GIB:>12.4f}"


def _host_read_lines(report: RankReport) -> Iterator[str]:
    yield ""
    yield "times that the host waits for the device, by place:"
    for place, count in sorted(report.host_reads.items(), key=lambda item: -item[1]):
        yield f"{count:>8}  {place}"
