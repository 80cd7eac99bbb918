"""A thread of each rank that samples it. Rank 0's thread reports stalls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import torch.distributed as dist

from megatron_rl.records.reminder import growing_intervals
from megatron_rl.run.supervision.rank_sample import RankSample, sample_rank
from megatron_rl.run.supervision.stall_detector import StallDetector
from megatron_rl.training.activity import Activity

_SAMPLE_SECONDS = 4.0
_STALL_SECONDS = 14.0
_JOIN_SECONDS = 5.0

_decoder = msgspec.json.Decoder(RankSample)


class StallMonitor:
    """Samples this rank while the context is active, and reports stalls on rank 0.

    A step that no rank moves in for 14 s is a stall: rank 0 then logs which rank the others wait
    for, with its stack, within 30 s of its beginning, and again at growing intervals.

    store: no other thread may use it. A store that fails ends the thread, not the run.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        activity: Activity,
        store: dist.Store,
        log: Callable[[str], None],
        *,
        sample_seconds: float = _SAMPLE_SECONDS,
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._rank = rank
        self._activity = activity
        self._store = store
        self._log = log
        self._sample_seconds = sample_seconds
        self._stall_seconds = stall_seconds
        self._world_size = world_size
        self._keys = [_key(other) for other in range(world_size)]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall monitor", daemon=True)

    def __enter__(self) -> StallMonitor:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join(_JOIN_SECONDS)

    def _watch(self) -> None:
        # The store's errors have no common base but Exception
        with contextlib.suppress(Exception):
            count = 0
            reporter = _StallReporter(self._world_size, self._stall_seconds, self._log)
            while not self._end.wait(self._sample_seconds):
                count += 1
                command = self._activity.current
                if command is None or count == 1 or self._has_run_long(command.start):
                    self._publish(count)
                if self._rank == 0:
                    self._report(reporter)

    def _has_run_long(self, start: float) -> bool:
        return time.monotonic() - start >= self._sample_seconds

    def _publish(self, count: int) -> None:
        sample = sample_rank(count, self._activity.current)
        self._store.set(_key(self._rank), msgspec.json.encode(sample).decode())

    def _report(self, reporter: _StallReporter) -> None:
        command = self._activity.current
        if command is None or not self._has_run_long(command.start):
            reporter.reset()
            return
        if self._store.check(self._keys):
            values = self._store.multi_get(self._keys)
            samples = {rank: _decoder.decode(value) for rank, value in enumerate(values)}
            reporter.observe(command.number, samples, time.monotonic())


class _StallReporter:
    """Logs the stall of one command, once and then at growing intervals."""

    def __init__(self, world_size: int, seconds: float, log: Callable[[str], None]) -> None:
        self._world_size = world_size
        self._seconds = seconds
        self._log = log
        self.reset()

    def reset(self) -> None:
        """Begin anew: no command runs, or another one."""
        self._number = 0
        self._detector = StallDetector(self._world_size, self._seconds)
        self._intervals = growing_intervals(self._seconds)
        self._next_report = 0.0

    def observe(self, number: int, samples: dict[int, RankSample], now: float) -> None:
        """Add samples taken in the command with this number. now: monotonic seconds."""
        if number != self._number:
            self.reset()
            self._number = number
        self._detector.observe(samples, now)
        if now < self._next_report:
            return
        text = self._detector.describe_stall(now)
        if text:
            self._log(text)
            self._next_report = now + next(self._intervals)


def _key(rank: int) -> str:
    return f"rank_sample/{rank}"
