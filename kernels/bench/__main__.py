"""`python -m bench`: measure, print a table, write JSON.

The file is complete after each row. Exit code: 0, or 1 if one of our operations failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

# Inductor would start a process for each core, with the memory of torch, for a few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from bench import report
from bench.implementation import BenchmarkCase
from bench.logprob_cases import logprob_cases
from bench.objective_cases import objective_cases
from bench.quantize_cases import quantize_cases
from bench.rows import CaseMeasurement

OPERATIONS = ("objective", "quantize", "logprob")
"""In the order of a run: the longest comes last."""


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
    """The cases of a run. The tensors of an operation are freed when the next one begins."""
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    if "objective" in arguments.operations:
        yield from objective_cases(device, 64, 32_768 if on_gpu else 4_096)
    if "quantize" in arguments.operations:
        yield from quantize_cases(device, 128 if on_gpu else 4)
    if "logprob" in arguments.operations:
        rows = arguments.rows or (16_384 if on_gpu else 2_048)
        vocabulary = arguments.vocabulary or (151_936 if on_gpu else 32_768)
        dtypes = [torch.bfloat16] if on_gpu else [torch.float32, torch.bfloat16]
        yield from logprob_cases(device, rows, vocabulary, dtypes)


def print_compiled() -> None:
    """Print registers, occupancy and bytes of the compiled kernels."""
    from bench.compiled import compile_cases
    from bench.compiled_report import describe

    print(describe({target: list(compile_cases(target)) for target in (90, 100)}))


def main() -> int:
    """Measure every case. Returns 1 if one of our operations failed."""
    arguments = parse()
    if arguments.compiled:
        print_compiled()
        return 0
    device = torch.device(arguments.device)
    default = f"{device.type}-{datetime.now(UTC):%Y-%m-%d}.json"
    path = arguments.output or Path(__file__).parent / "results" / default
    record = report.Record(path, device)
    failures = []
    for case in cases(arguments):
        if not CaseMeasurement(case, device, arguments.repeats).add_rows(record):
            failures.append(case.title)
    record.complete()
    print(f"copy: {record.copy_gb_s:.1f} GB/s (read + written)\n{report.table(record.rows)}")
    for name, reason in record.not_measured.items():
        print(f"not measured: {name} ({reason})")
    print(f"written: {path}")
    if failures:
        print(f"espo_kernels failed: {', '.join(failures)}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
