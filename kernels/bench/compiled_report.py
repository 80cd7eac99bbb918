"""Tables of the compiled kernels, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.compiled import CompiledCase, CompiledKernel
from bench.gpu_limits import H100, H200, Gpu

_GPUS = (H100, H200)
_KERNEL_HEADER = (
    "kernel",
    "programs × threads",
    "registers",
    "stack bytes",
    "shared bytes",
    "occupancy",
    "bytes",
)
_CASE_HEADER = (
    "operation",
    "shape",
    "launches",
    "MB, formula",
    "MB, as compiled",
    *(f"{gpu.name}, ms" for gpu in _GPUS),
)


def describe(cases: Mapping[int, Sequence[CompiledCase]]) -> str:
    """Both tables. cases: by compute capability."""
    targets = ", ".join(f"sm_{capability}" for capability in cases)
    first = next(iter(cases.values()))
    return "\n".join(
        [
            f"Compiled for {targets}, not measured. Two numbers in a cell are for two targets.",
            "",
            *kernel_table(cases),
            "",
            *case_table(first),
        ]
    )


def kernel_table(cases: Mapping[int, Sequence[CompiledCase]]) -> list[str]:
    """A row for each kernel: the lines of a table."""
    by_target = [_kernels(target) for target in cases.values()]
    rows = []
    for name, kernel in by_target[0].items():
        versions = [kernels[name] for kernels in by_target]
        rows.append(
            (
                name,
                f"{kernel.programs:,} × {kernel.threads}",
                _both([str(one.registers) for one in versions]),
                _both([str(one.stack_bytes) for one in versions]),
                _both([f"{one.shared_bytes:,}" for one in versions]),
                _both([f"{one.occupancy:.1%}".replace(".0%", "%") for one in versions]),
                f"{kernel.element_bytes:g} for each {kernel.element}",
            )
        )
    return _table(_KERNEL_HEADER, rows)


def case_table(cases: Sequence[CompiledCase]) -> list[str]:
    """A row for each benchmark case: the lines of a table.

    The milliseconds are for the formula's bytes at the peak bandwidth of the GPU's memory.
    """
    rows = [
        (
            f"{case.operation}, {case.part}",
            f"{case.shape}, {case.dtype}",
            _launches(case),
            _megabytes(case.formula_bytes),
            _megabytes(case.num_bytes),
            *(f"{milliseconds(case.formula_bytes, gpu):.3f}" for gpu in _GPUS),
        )
        for case in cases
    ]
    return _table(_CASE_HEADER, rows)


def milliseconds(num_bytes: int, gpu: Gpu) -> float:
    """The time of the bytes at the peak bandwidth: no kernel is faster without a cache."""
    return num_bytes / gpu.bytes_per_s * 1e3


def _kernels(cases: Sequence[CompiledCase]) -> dict[str, CompiledKernel]:
    """The launches of a kernel that moves the most bytes, by name."""
    largest: dict[str, CompiledKernel] = {}
    for case in cases:
        for kernel in case.kernels:
            before = largest.setdefault(kernel.kernel, kernel)
            if before.num_bytes < kernel.num_bytes:
                largest[kernel.kernel] = kernel
    return largest


def _launches(case: CompiledCase) -> str:
    torch_names = [launch.operation for launch in case.torch_launches]
    number = str(len(case.kernels))
    return f"{number}, and torch's {', '.join(torch_names)}" if torch_names else number


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _both(texts: Sequence[str]) -> str:
    """One text if all are equal."""
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
