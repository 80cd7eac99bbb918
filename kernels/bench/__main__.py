"""`python -m bench`: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from bench import measure, report
from bench.implementation import BenchmarkCase, Implementation
from bench.logprob_cases import logprob_cases
from bench.objective_cases import objective_cases
from bench.quantize_cases import quantize_cases

OPERATIONS = ("logprob", "objective", "quantize")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="measure nothing: compile the Triton kernels at the sizes of a GPU, which needs none",
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--rows", type=int, help="tokens of the logits (2048 on CPU, 16384 on CUDA)"
    )
    parser.add_argument(
        "--vocabulary", type=int, help="columns of the logits (32768 on CPU, 151936 on CUDA)"
    )
    parser.add_argument(
        "--output", type=Path, help="JSON file; default bench/results/<device>-<date>.json"
    )
    return parser.parse_args()


def cases(arguments: argparse.Namespace) -> Iterator[BenchmarkCase]:
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    if "logprob" in arguments.operations:
        rows = arguments.rows or (16_384 if on_gpu else 2_048)
        vocabulary = arguments.vocabulary or (151_936 if on_gpu else 32_768)
        dtypes = [torch.bfloat16] if on_gpu else [torch.float32, torch.bfloat16]
        yield from logprob_cases(device, rows, vocabulary, dtypes)
    if "objective" in arguments.operations:
        yield from objective_cases(device, 64, 32_768 if on_gpu else 4_096)
    if "quantize" in arguments.operations:
        yield from quantize_cases(device, 128 if on_gpu else 4)


def rows_of(
    case: BenchmarkCase, device: torch.device, repeats: int
) -> tuple[list[report.Row], float]:
    """(a row per implementation, the copy bandwidth in bytes per second measured among them)."""
    differences = _differences(case)
    peaks = {one.name: _peak_ratio(case, one, device) for one in case.implementations}
    runs = {one.name: one.run for one in case.implementations}
    copy, copy_bytes = measure.copy_run(device, case.input_bytes)
    timings = measure.seconds({**runs, "copy": copy}, device, repeats)
    copy_bytes_s = copy_bytes / timings["copy"].best
    ours = timings[case.implementations[0].name].best
    rows = []
    for one in case.implementations:
        best, median = timings[one.name]
        rows.append(
            report.Row(
                **_labels(case, one),
                best_ms=round(best * 1e3, 4),
                median_ms=round(median * 1e3, 4),
                bytes_moved=case.bytes_moved,
                share_of_copy=round(case.bytes_moved / best / copy_bytes_s, 4),
                extra_peak_ratio=peaks[one.name],
                times_ours=round(best / ours, 3),
                max_difference=differences.get(one.name),
                note=one.note,
            )
        )
    return rows, copy_bytes_s


def _labels(case: BenchmarkCase, one: Implementation) -> dict[str, str]:
    return {
        "operation": case.operation,
        "part": case.part,
        "shape": case.shape,
        "dtype": case.dtype,
        "implementation": one.name,
    }


def _peak_ratio(case: BenchmarkCase, one: Implementation, device: torch.device) -> float | None:
    peak = measure.extra_peak_bytes(one.run, device)
    return None if peak is None else round(peak / case.input_bytes, 3)


def _differences(case: BenchmarkCase) -> dict[str, float]:
    """The largest difference of each implementation's results to ours, by name."""
    ours = [tensor.double().cpu() for tensor in case.implementations[0].run()]
    return {one.name: _largest_difference(one, ours) for one in case.implementations if one.compare}


def _largest_difference(one: Implementation, ours: list[torch.Tensor]) -> float:
    pairs = zip(one.run(), ours, strict=True)
    return max(
        (float((theirs.double().cpu() - our).abs().max()) for theirs, our in pairs), default=0.0
    )


def print_compiled() -> None:
    """Print registers, occupancy and bytes of the compiled kernels."""
    from bench.compiled import compile_cases
    from bench.compiled_report import describe

    print(describe({target: list(compile_cases(target)) for target in (90, 100)}))


def main() -> None:
    arguments = parse()
    if arguments.compiled:
        print_compiled()
        return
    device = torch.device(arguments.device)
    rows: list[report.Row] = []
    absent: dict[str, str] = {}
    copies: list[float] = []
    for case in cases(arguments):
        case_rows, copy_bytes_s = rows_of(case, device, arguments.repeats)
        rows += case_rows
        copies.append(copy_bytes_s / 1e9)
        absent |= case.absent
    print(f"copy: {max(copies):.1f} GB/s (read + written)\n{report.table(rows)}")
    for name, reason in absent.items():
        print(f"not measured: {name} ({reason})")
    facts = report.machine(device)
    default = Path(__file__).parent / "results" / f"{device.type}-{facts['date']}.json"
    path = arguments.output or default
    report.write(path, device, max(copies), rows, absent)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
