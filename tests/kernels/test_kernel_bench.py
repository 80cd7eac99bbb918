"""The benchmark command with its smallest inputs, and its memory at any size."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import __main__ as command
from bench import compare, logprob_cases, measure, peers
from bench.compare import largest_difference
from bench.implementation import BenchmarkCase, Goal, Implementation, Run
from bench.report import Record, Row, table
from bench.rows import CaseMeasurement
from torch.utils._python_dispatch import TorchDispatchMode

from launch.rehearsal.memory_meter import MemoryMeter
from tests.kernels.processes import ROOT, importable

CPU = torch.device("cpu")


def run_bench(output: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run `python -m bench`; its output, and the record that it writes."""
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench",
            "--device",
            "cpu",
            "--repeats",
            "1",
            "--output",
            str(output),
            *arguments,
        ],
        cwd=ROOT / "kernels",
        capture_output=True,
        text=True,
        timeout=240,
        env=importable(),
    )
    assert process.returncode == 0, process.stderr
    record = json.loads(output.read_text())
    assert record["copy_gb_s"] > 0
    assert all(row["best_ms"] > 0 for row in record["rows"])
    return process.stdout, record


@pytest.mark.slow
def test_one_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    output, record = run_bench(tmp_path / "result.json", "--operations", "objective")
    assert "loss + gradient" in output
    assert [(row["part"], row["implementation"]) for row in record["rows"]] == [
        ("grouping", "espo_kernels"),
        ("grouping", "reference"),
        ("loss + gradient", "espo_kernels"),
        ("loss + gradient", "eager"),
    ]
    assert record["rows"][-1]["max_difference"] < 1e-4
    assert record["complete"] and record["host_peak_gb"] > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_bench_compares_logprobs_with_eager_torch(tmp_path: Path) -> None:
    arguments = ["--operations", "logprob", "--rows", "4", "--vocabulary", "1000"]
    output, record = run_bench(tmp_path / "result.json", *arguments)
    assert "espo_kernels, in place" in output
    in_place = [r for r in record["rows"] if r["implementation"] == "espo_kernels, in place"]
    assert [row["max_difference"] for row in in_place] == [0.0, 0.0]
    parts = {
        (row["part"], row["dtype"])
        for row in record["rows"]
        if row["implementation"] == "espo_kernels"
    }
    assert parts == {
        (part, dtype)
        for part in ("forward", "forward + backward")
        for dtype in ("float32", "bfloat16")
    }
    eager = [
        r for r in record["rows"] if r["implementation"] == "eager" and r["dtype"] == "float32"
    ]
    assert eager and all(row["max_difference"] < 1e-4 for row in eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_chunks_have_the_difference_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(compare, "CHUNK_ELEMENTS", chunk)
    references = [torch.randn(9, 31), torch.randn(5), torch.randn(0)]
    results = [(r + 0.1 * torch.randn(r.shape)).to(dtype) for r in references]
    whole = [
        (a.double() - b.double()).abs().flatten() for a, b in zip(results, references, strict=True)
    ]
    assert largest_difference(results, references).item() == torch.cat(whole).max().item()
    for place in ((0, 0), (8, 30)):
        results[0][place] = math.nan
        assert math.isnan(largest_difference(results, references).item())
        results[0][place] = 0


def test_results_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 1\): must have as many elements"):
        largest_difference([torch.ones(3, 1)], [torch.ones(4)])


def test_a_comparison_copies_nothing_to_the_host() -> None:
    """Tensors without data at the size of a GPU: whatever reads them on the host fails."""
    gradient = torch.empty(16_384, 151_936, dtype=torch.bfloat16, device="meta")
    assert largest_difference([gradient], [gradient]).is_meta
    with pytest.raises(NotImplementedError):
        gradient[0].cpu()


class _Storages(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = MemoryMeter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor):
                self.meter.add(one)
        return result


ROWS = 64
VOCABULARY = 4096
# Peaks in units of the logits. At the size of a GPU the logits have 5.0 GB.
MOST_LOGITS = {"espo_kernels": 4, "espo_kernels, in place": 3, "eager": 9}


class _Peaks(Record):
    """Also keeps the peak of each row."""

    def __init__(self, path: Path, meter: MemoryMeter) -> None:
        super().__init__(path, CPU)
        self.peaks: list[tuple[str, str, int]] = []
        self._meter = meter

    def add(self, row: Row, copy_bytes_s: float) -> None:
        super().add(row, copy_bytes_s)
        self.peaks.append((row.part, row.implementation, self._meter.peak.total()))
        self._meter.start_peak()


# The share of the size of a GPU
SCALE = ROWS * VOCABULARY / (16_384 * 151_936)


@pytest.fixture
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the copies that are timed beside each row be as much smaller as the logits."""
    copy_of_gpu_size = measure.copy_run

    def copy_run(device: torch.device, num_bytes: int) -> tuple[Run, int]:
        return copy_of_gpu_size(device, num_bytes, smallest=4, largest=int((1 << 31) * SCALE))

    monkeypatch.setattr(measure, "copy_run", copy_run)


@pytest.fixture
def _kept_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage, which all other tests of this process have left."""
    monkeypatch.setattr(measure, "give_back_free_memory", lambda _: None)


@pytest.mark.slow
@pytest.mark.usefixtures("_small_copies")
def test_a_case_needs_nine_times_the_logits_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The largest row needs 45 GB at the size of a GPU, of 60 GB that it may take.

    The chunks of a comparison are as much smaller here as the logits.
    """
    monkeypatch.setattr(compare, "CHUNK_ELEMENTS", int(compare.CHUNK_ELEMENTS * SCALE))
    monkeypatch.setattr(
        logprob_cases, "torch_compile", lambda *_: peers.Peer("torch.compile", None)
    )
    storages = _Storages()
    record = _Peaks(tmp_path / "result.json", storages.meter)
    with storages:
        for case in logprob_cases.logprob_cases(CPU, ROWS, VOCABULARY, [torch.bfloat16]):
            storages.meter.start_peak()
            assert CaseMeasurement(case, CPU, 1).add_rows(record)
            kept_bytes = storages.meter.current.total()
            assert kept_bytes < 1.1 * case.input_bytes, "the logits, targets and a row's numbers"
    assert len(record.peaks) == 5
    for part, name, peak in record.peaks:
        assert peak < MOST_LOGITS[name] * case.input_bytes, (part, name, peak / case.input_bytes)


def fill(value: float) -> Run:
    return lambda: [torch.full((1000,), value)]


def fail() -> list[torch.Tensor]:
    raise RuntimeError("out of memory\nand more")


def case_of(*implementations: Implementation) -> BenchmarkCase:
    return BenchmarkCase("fill", "all", "1000", "float32", 4000, 4000, implementations)


@pytest.mark.usefixtures("_small_copies", "_kept_garbage")
def test_an_implementation_that_fails_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    record = Record(tmp_path / "result.json", CPU)
    case = case_of(
        Implementation("ours", fill(1.0)),
        Implementation("broken", fail),
        Implementation("theirs", fill(1.5)),
    )
    assert CaseMeasurement(case, CPU, 1).add_rows(record)
    content = json.loads((tmp_path / "result.json").read_text())
    rows = [(row["implementation"], row["max_difference"]) for row in content["rows"]]
    assert rows == [("ours", 0.0), ("theirs", 0.5)]
    assert content["not_measured"] == {"broken, fill all float32": "RuntimeError: out of memory"}


@pytest.mark.usefixtures("_small_copies", "_kept_garbage")
def test_a_failure_of_ours_is_reported_and_the_others_are_measured(tmp_path: Path) -> None:
    record = Record(tmp_path / "result.json", CPU)
    case = case_of(Implementation("ours", fail), Implementation("theirs", fill(1.5)))
    assert not CaseMeasurement(case, CPU, 1).add_rows(record)
    assert [(row.implementation, row.times_ours) for row in record.rows] == [("theirs", None)]
    assert "theirs" in table(record.rows)


@pytest.mark.usefixtures("_kept_garbage")
def test_a_first_run_precedes_the_reset_of_the_peak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch.compile tunes its kernels in the first run.

    Where a copy of what they change would raise the peak of the GPU's memory, Inductor makes it on
    the host: 17 GB for the gradient of 16,384 × 151,936 logits.
    """
    events = []

    def run() -> list[torch.Tensor]:
        events.append("run")
        return [torch.zeros(1000)]

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2_000_000_000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(measure, "copy_run", lambda *_: (run, 4000))
    timing = measure.Timing(1e-3, 1e-3)
    monkeypatch.setattr(measure, "seconds", lambda runs, *_: dict.fromkeys(runs, timing))
    record = Record(tmp_path / "result.json", CPU)
    case = case_of(Implementation("ours", run), Implementation("theirs", run))
    assert CaseMeasurement(case, torch.device("cuda"), 1).add_rows(record)
    assert events == ["run", "reset", "run"] * 2
    assert [row.card_gb for row in record.rows] == [2.0, 2.0]


@pytest.mark.usefixtures("_small_copies", "_kept_garbage")
def test_the_file_is_complete_after_each_row(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    record = Record(file, CPU)
    contents = [json.loads(file.read_text())]

    def read_file() -> list[torch.Tensor]:
        contents.append(json.loads(file.read_text()))
        return [torch.zeros(1000)]

    case = case_of(Implementation("ours", fill(1.0)), Implementation("theirs", read_file))
    CaseMeasurement(case, CPU, 1).add_rows(record)
    record.complete()
    contents.append(json.loads(file.read_text()))
    names = [[row["implementation"] for row in content["rows"]] for content in contents]
    assert names[:2] == [[], ["ours"]] and names[-1] == ["ours", "theirs"]
    assert [content["complete"] for content in contents] == [False] * (len(contents) - 1) + [True]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_longest_operation_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def cases_of(name: str) -> Any:
        return lambda *_: [name]

    for name in ("logprob", "objective", "quantize"):
        monkeypatch.setattr(command, f"{name}_cases", cases_of(name))
    monkeypatch.setattr(sys, "argv", ["bench", "--operations", "logprob", "quantize", "objective"])
    assert list(command.cases(command.parse())) == ["objective", "quantize", "logprob"]


@pytest.mark.parametrize(
    ("goal", "best_ms", "share", "verdict"),
    [
        (Goal(most_us=50), 0.0473, 0.1, "≤ 50 µs: 47.3 µs, reached"),
        (Goal(most_us=150), 0.1512, 0.1, "≤ 150 µs: 151.2 µs, missed"),
        (Goal(least_of_copy=0.9), 1.2, 0.912, "≥ 90% of copy: 91.2%, reached"),
        (Goal(least_of_copy=0.88), 1.2, 0.8712, "≥ 88% of copy: 87.1%, missed"),
    ],
)
def test_a_row_shows_its_goal_with_the_number(
    goal: Goal, best_ms: float, share: float, verdict: str
) -> None:
    row = Row(
        operation="fill",
        part="all",
        shape="1",
        dtype="float32",
        implementation="ours",
        best_ms=best_ms,
        median_ms=best_ms,
        bytes_moved=1,
        share_of_copy=share,
        extra_peak_ratio=None,
        card_gb=None,
        times_ours=1.0,
        max_difference=None,
        goal=str(goal),
        is_reached=goal.is_reached(best_ms / 1e3, share),
        note="",
    )
    assert verdict in table([row]) and verdict in str(row)
