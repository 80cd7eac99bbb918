"""Rows of a case: each implementation is compared with ours, measured and freed, one by one."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch

from bench import measure
from bench.compare import largest_difference
from bench.implementation import BenchmarkCase, Implementation
from bench.report import Record, Row


class CaseMeasurement:
    """Measures one case.

    Ours is the first implementation. Its results are kept for the comparisons, and nothing else.
    """

    def __init__(self, case: BenchmarkCase, device: torch.device, repeats: int) -> None:
        self._case = case
        self._device = device
        self._repeats = repeats
        self._our_results: Sequence[torch.Tensor] | None = None
        self._our_seconds: float | None = None

    def add_rows(self, record: Record) -> bool:
        """Add a row for each implementation. Returns whether ours could be measured.

        An implementation that fails is listed with its error, and the others are measured.
        """
        record.leave_out(self._case.absent)
        for one in self._case.implementations:
            try:
                row, copy_bytes_s = self._row(one)
            except Exception as error:
                traceback.print_exc()
                first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
                record.leave_out({f"{one.name}, {self._case.title}": first_line})
            else:
                record.add(row, copy_bytes_s)
            measure.give_back_free_memory(self._device)
        return self._our_seconds is not None

    def _row(self, one: Implementation) -> tuple[Row, float]:
        """(the implementation's row, the copy bandwidth in bytes per second measured beside it)."""
        case = self._case
        # Before the peak is reset: Inductor tunes kernels within it, or else with host memory.
        difference = self._difference(one)
        peak = measure.extra_peak_bytes(one.run, self._device)
        copy, copy_bytes = measure.copy_run(self._device, case.input_bytes)
        timings = measure.seconds({"run": one.run, "copy": copy}, self._device, self._repeats)
        card_gb = measure.card_peak_gb(self._device)
        copy_bytes_s = copy_bytes / timings["copy"].best
        row = Row(
            operation=case.operation,
            part=case.part,
            shape=case.shape,
            dtype=case.dtype,
            implementation=one.name,
            bytes_moved=case.bytes_moved,
            extra_peak_ratio=None if peak is None else round(peak / case.input_bytes, 3),
            card_gb=None if card_gb is None else round(card_gb, 2),
            max_difference=difference,
            note=one.note,
            **self._times(one, timings["run"], copy_bytes_s),
        )
        return row, copy_bytes_s

    def _times(
        self, one: Implementation, timing: measure.Timing, copy_bytes_s: float
    ) -> dict[str, Any]:
        """The fields of a row that follow from the time."""
        case = self._case
        is_ours = one is case.implementations[0]
        best, median = timing
        if is_ours:
            self._our_seconds = best
        share = case.bytes_moved / best / copy_bytes_s
        goal = case.goal if is_ours and self._device.type == "cuda" else None
        return {
            "best_ms": round(best * 1e3, 4),
            "median_ms": round(median * 1e3, 4),
            "share_of_copy": round(share, 4),
            "times_ours": self._our_seconds and round(best / self._our_seconds, 3),
            "goal": "" if goal is None else str(goal),
            "is_reached": None if goal is None else goal.is_reached(best, share),
        }

    def _difference(self, one: Implementation) -> float | None:
        """The largest difference of its results to ours. None if they cannot be compared."""
        if one is self._case.implementations[0]:
            self._our_results = one.run()
            return float(largest_difference(self._our_results, self._our_results))
        if self._our_results is None or not one.compare:
            return None
        return float(largest_difference(one.run(), self._our_results))
